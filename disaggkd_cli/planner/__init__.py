"""`disaggkd plan`: what fits, how fast, and why, before anything is rented. Works without torch, network or GPU."""
