"""The names of the losses on hidden states. Imports no torch."""

COSINE = "cosine"
MSE = "mse"

HIDDEN_LOSSES = (COSINE, MSE)
"""The names that there are."""
