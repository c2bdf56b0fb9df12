"""From tokenised documents to the sequences of both splits, and to micro-batches."""
