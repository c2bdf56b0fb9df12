"""Which sequence is trained on when."""
