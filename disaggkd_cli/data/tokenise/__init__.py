"""From documents to token ids and which of them count."""
