"""Run as two ranks by torchrun: compare each family's hidden states, spread over both ranks, with those of one.

Prints `family same share difference`: whether the sharded ones are bitwise the same, this rank's share of all weights,
and the largest relative difference of the tensor-parallel ones, or `refused`.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from disaggkd_cli.config import Config
from disaggkd_cli.errors import UserError
from disaggkd_cli.models import requested_states
from disaggkd_cli.models.verified import load_verified_teacher
from disaggkd_cli.replica.sharded import load_sharded_teacher
from disaggkd_cli.replica.tensor import load_tensor_parallel_teacher

CPU = torch.device("cpu")


def states_of(teacher):
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, teacher.vocabulary_size, (3, 24), generator=generator, dtype=torch.int32)
    lengths = torch.tensor([24] * 3, dtype=torch.int32)
    return requested_states(teacher.backbone, ids, lengths, torch.arange(72, dtype=torch.int32), CPU)


def main(directory: str, families: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for family in families:
        config = Config()
        config.teacher.model, config.teacher.dtype, config.data.packing = f"{directory}/{family}", "float32", "off"
        one = load_verified_teacher(config, CPU)
        expected = states_of(one)
        sharded = load_sharded_teacher(config, CPU, dist.group.WORLD)
        same = torch.equal(states_of(sharded), expected) and torch.equal(states_of(sharded), expected)
        for module in sharded.backbone.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        parameters = [p.to_local() if isinstance(p, DTensor) else p for p in sharded.backbone.parameters()]
        share = sum(p.numel() for p in parameters) / sum(p.numel() for p in one.backbone.parameters())
        try:
            spread = load_tensor_parallel_teacher(config, CPU, dist.group.WORLD)
            difference = ((states_of(spread) - expected).norm() / expected.norm()).item()
        except UserError as error:
            refusals = ("no tensor-parallel plan", "cannot share num_")
            difference = "refused" if any(words in str(error) for words in refusals) else error
        if dist.get_rank() == 0:
            print(family, same, round(share, 3), difference, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
