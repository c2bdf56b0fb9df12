"""Tokens and laid-out sequences on disk, kept for other ranks and later runs."""
