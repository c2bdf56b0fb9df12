"""Texts that are tokenised while training goes on."""
