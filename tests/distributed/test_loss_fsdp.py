"""The loss inside the forward of an FSDP2 root: gradients equal one process that sees all rows."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from disaggkd_cli.losses import Head, fused_kd_loss, reference_kd_loss
from tests.support.spawn import spawn

LAYOUTS = [(True, "", False), (False, "", True), (False, "head", False), (False, "embedding", False)]
"""Tied or not, the part that is frozen, the teacher's head sharded or whole on each rank."""
VOCABULARY, WIDTH, TEACHER_WIDTH, STEPS, ROWS = 31, 8, 12, 3, 10


class Student(nn.Module):
    """An embedding, a layer and a head, whose forward computes the loss, so that the head is whole there."""

    def __init__(self, tied: bool, loss=fused_kd_loss) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight
        self.loss = loss

    def forward(self, ids, teacher_hidden, teacher_head, labels, num_tokens):
        """Return the scalar loss of token ids [R]."""
        hidden = torch.tanh(self.layer(self.embedding(ids)))
        return self.loss(
            hidden, Head(self.head.weight, self.head.bias), teacher_hidden, teacher_head, labels,
            ce_weight=0.5, temperature=2.0, num_tokens=num_tokens, memory_budget=30_000,
        ).loss  # fmt: skip


def _batch(step: int, rank: int, micro: int):
    """Token ids, teacher states and labels; rank 1's second micro-batch of each step has no supervised row."""
    draw = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    ids = torch.randint(0, VOCABULARY, (ROWS,), generator=draw)
    labels = torch.randint(0, VOCABULARY, (ROWS,), generator=draw)
    labels[: 3 * rank] = -100
    if rank == 1 and micro == 1:
        labels[:] = -100
    return ids, torch.randn(ROWS, TEACHER_WIDTH, generator=draw), labels


def _train_all(rank: int, world: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for tied, frozen, teacher_sharded in LAYOUTS:
        _train(rank, world, tied, frozen, teacher_sharded)
    dist.destroy_process_group()


def _train(rank: int, world: int, tied: bool, frozen: str, teacher_sharded: bool) -> None:
    mesh = init_device_mesh("cpu", (world,))
    teacher_weight = torch.randn(VOCABULARY + 2, TEACHER_WIDTH, generator=torch.Generator().manual_seed(3))
    sharded, single = Student(tied), Student(tied, reference_kd_loss)
    for model in (sharded, single):
        for name in filter(None, [frozen]):
            getattr(model, name).requires_grad_(False)
    fully_shard(sharded.layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    for unit in (sharded.layer, sharded):
        # The loss is divided by the global count of tokens already.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    own_teacher = distribute_tensor(teacher_weight, mesh, [Shard(0)]) if teacher_sharded else teacher_weight
    optimizers = [
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5) for model in (sharded, single)
    ]
    for step in range(STEPS):
        batches = {(r, m): _batch(step, r, m) for r in range(world) for m in range(2)}
        count = torch.tensor(sum(int((labels != -100).sum()) for _, _, labels in batches.values()))
        for micro in range(2):
            sharded.set_requires_gradient_sync(micro == 1)
            ids, hidden, labels = batches[rank, micro]
            sharded(ids, hidden, Head(own_teacher), labels, count).backward()
        for ids, hidden, labels in batches.values():
            single(ids, hidden, Head(teacher_weight), labels, count).backward()
        for ours, theirs in zip(sharded.parameters(), single.parameters(), strict=True):
            if not theirs.requires_grad:
                assert ours.grad is None
                continue
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.timeout(200)
def test_gradients_equal_one_process_under_accumulation(tmp_path):
    spawn(_train_all, (2, f"{tmp_path}/store"), 2)
