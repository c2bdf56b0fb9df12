"""The vocabulary-parallel loss on gloo ranks gives the value and the gradients of one process."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from disaggkd_cli.errors import UserError
from disaggkd_cli.losses import DIVERGENCES, Head, fused_kd_loss, reference_kd_loss, shard_bounds
from tests.support.spawn import spawn

CASES = {
    2: [((10, 10), "even"), ((4099, 4099), "even"), ((10, 13), "uneven")],
    # Five ids in blocks of two leave the last of four ranks with none.
    4: [((10, 10), "even"), ((4099, 4000), "even"), ((13, 10), "uneven"), ((5, 5), "even")],
}
"""Student and teacher vocabulary, and how they are cut, for groups of two and four."""
ROWS, STUDENT_WIDTH, TEACHER_WIDTH = 21, 6, 9


def _inputs(seed: int, vocabulary: int, teacher_vocabulary: int):
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    labels = torch.randint(0, vocabulary, (ROWS,), generator=draw)
    labels[::5] = -100
    hidden = normal(ROWS, STUDENT_WIDTH).requires_grad_()
    head = Head(normal(vocabulary, STUDENT_WIDTH).requires_grad_(), normal(vocabulary).requires_grad_(), 0.9, 6.0)
    return hidden, head, normal(ROWS, TEACHER_WIDTH), Head(normal(teacher_vocabulary, TEACHER_WIDTH)), labels


def _local(head: Head, start: int, stop: int) -> Head:
    """A shard of its own leaves."""
    cut = head.rows(start, min(stop, len(head.weight)))
    bias = None if cut.bias is None else cut.bias.detach().clone().requires_grad_()
    return Head(cut.weight.detach().clone().requires_grad_(), bias, cut.scale, cut.softcap)


def _bounds(cut: str, vocabulary: int, world: int, rank: int) -> tuple[int, int]:
    if cut == "even":
        return shard_bounds(vocabulary, world, rank)
    # Uneven: rank 0 holds 3 ids, the last rank the rest, those between share a few.
    edges = [0, *(3 + 2 * index for index in range(world - 1)), vocabulary]
    return edges[rank], edges[rank + 1]


def _compare_all(rank: int, world: int, store: str, seed: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for vocabularies, cut in CASES[world]:
        _compare(rank, world, seed, vocabularies, cut)
        _compare_ties(rank, world, seed, vocabularies, cut)
    dist.destroy_process_group()


def _compare(rank: int, world: int, seed: int, vocabularies: tuple[int, int], cut: str) -> None:
    for number, divergence in enumerate(DIVERGENCES):
        hidden, head, teacher_hidden, teacher_head, labels = _inputs(seed + number, *vocabularies)
        options = dict(divergence=divergence, temperature=1.5, ce_weight=0.5, beta=0.3)
        whole = reference_kd_loss(hidden, head, teacher_hidden, teacher_head, labels, **options)
        (whole.loss * 1.3).backward()
        start, stop = _bounds(cut, max(vocabularies), world, rank)
        own, teacher = _local(head, start, stop), _local(teacher_head, start, stop)
        own_hidden = hidden.detach().clone().requires_grad_()
        budget = 30_000 + 10_000 * rank  # ranks must agree on windows even so
        out = fused_kd_loss(
            own_hidden, own, teacher_hidden, teacher, labels, group=dist.group.WORLD, memory_budget=budget, **options
        )
        (out.loss * 1.3).backward()
        for name in out.__dataclass_fields__:
            torch.testing.assert_close(getattr(out, name), getattr(whole, name), rtol=1e-10, atol=1e-12, msg=name)
        torch.testing.assert_close(own_hidden.grad, hidden.grad, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(own.weight.grad, head.weight.grad[start:stop], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(own.bias.grad, head.bias.grad[start:stop], rtol=1e-9, atol=1e-11)
        with torch.no_grad():
            evaluated = fused_kd_loss(
                own_hidden, own, teacher_hidden, teacher, labels, group=dist.group.WORLD, **options
            )
        torch.testing.assert_close(evaluated.loss, whole.loss.detach(), rtol=1e-10, atol=1e-12)


def _compare_ties(rank: int, world: int, seed: int, vocabularies: tuple[int, int], cut: str) -> None:
    """Logits of five values: the first of the likeliest ids counts, on whichever rank it lies."""
    shared = min(vocabularies)
    draw = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randint(-2, 3, (ROWS, size), generator=draw).double() for size in vocabularies)
    teacher[:3], student[:3, :shared], student[0, :shared] = 1.0, 0.0, 1.0
    expected = (student[:, :shared].argmax(-1) == teacher[:, :shared].argmax(-1)).double().mean()
    start, stop = _bounds(cut, max(vocabularies), world, rank)
    heads = [Head(torch.eye(size, dtype=torch.float64)) for size in vocabularies]
    own, own_teacher = (head.rows(start, min(stop, len(head.weight))) for head in heads)
    whole = reference_kd_loss(student, heads[0], teacher, heads[1])
    out = fused_kd_loss(student, own, teacher, own_teacher, group=dist.group.WORLD, memory_budget="4MiB")
    for found in (whole, out):
        torch.testing.assert_close(found.top1_agreement, expected, rtol=1e-12, atol=1e-12)


def _refuse(rank: int, world: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    hidden, head, teacher_hidden, teacher_head, labels = _inputs(1, 10, 10)
    own, teacher = head.rows(5 * rank, 5 * rank + 5), teacher_head.rows(6 * rank, 6 + 4 * rank)
    with pytest.raises(UserError, match="rank 0 of group= holds student ids 0 to 4 and teacher ids 0 to 5.*same ids"):
        fused_kd_loss(hidden, own, teacher_hidden, teacher, labels, group=dist.group.WORLD)
    rows = slice(0, 20 + rank)
    with pytest.raises(UserError, match=r"different numbers of rows \(20, 21\)"):
        fused_kd_loss(hidden[rows], own, teacher_hidden[rows], own_teacher(teacher_head, rank), group=dist.group.WORLD)
    dist.destroy_process_group()


def own_teacher(head: Head, rank: int) -> Head:
    """The teacher's shard at the student's ids."""
    return head.rows(5 * rank, 5 * rank + 5)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("world", [2, 4])
def test_equals_one_process(world, tmp_path):
    seed = random.randrange(2**31)
    print(f"seed={seed}")
    spawn(_compare_all, (world, f"{tmp_path}/store", seed), world)


@pytest.mark.timeout(120)
def test_misaligned_shards_and_rows_are_refused_on_every_rank(tmp_path):
    spawn(_refuse, (2, f"{tmp_path}/store"), 2)
