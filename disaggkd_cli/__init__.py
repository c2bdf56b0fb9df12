"""Distil large causal language models with the teacher on its own ranks."""

__version__ = "0.2.0"
