"""One teacher on several ranks: their process world, and the three ways to share the weights.

Sharded (FSDP) or tensor-parallel, every rank takes part in every forward: `rounds` is the agreement on which forward
comes next, `sharded` and `tensor` how the model is spread, `run` puts them together. As a pipeline, each rank holds
some layers and works on a request of its own: `staged` loads them, `stage_links` moves hidden states between
neighbours, `pipeline` is a stage at work, `run_stages` puts them together. `engines` is the table of the
three, `layout` settles which of them it is, and `world` is how the ranks find each other.
"""

from disaggkd_cli.replica.engines import ENGINES
from disaggkd_cli.replica.layout import settle_layout

__all__ = ["ENGINES", "settle_layout"]
