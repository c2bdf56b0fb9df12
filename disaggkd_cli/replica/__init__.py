"""One teacher on several ranks: their process world, whose turn a forward is, and the two ways to share the weights.

Every rank of a replica takes part in every forward. `rounds` is the agreement on which forward comes next, `world` how
the ranks find each other, `sharded` (FSDP) and `tensor` how the model is spread, `run` puts them together.
"""
