"""Ranks tell each other texts of any length, none at all among them."""

import torch.distributed as dist

from disaggkd_cli.collective_texts import gathered_texts
from tests.support.spawn import spawn

TEXTS = ["", "one rank's text\nof two lines", "Grüße"]


def _tell(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=len(TEXTS))
    assert gathered_texts(TEXTS[rank]) == TEXTS
    assert gathered_texts("") == [""] * len(TEXTS)
    dist.destroy_process_group()


def test_all_ranks_read_the_texts_of_all(tmp_path):
    spawn(_tell, (str(tmp_path / "meeting"),), len(TEXTS))
