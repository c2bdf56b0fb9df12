"""One training step or several of a tiny student in some layout of ranks, beside the same in one process."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from disaggkd_cli.config import LossConfig, TrainConfig
from disaggkd_cli.data import MicroBatch, Sequence, collate, empty_micro_batch
from disaggkd_cli.losses import Head
from disaggkd_cli.models import router_loss_of
from disaggkd_cli.training.layout import StudentLayout, student_mesh
from disaggkd_cli.training.optimizer import build_optimizer, clip_gradients
from disaggkd_cli.training.student_module import StudentModule, shard_student
from tests.support.models import VOCABULARY, tiny_model

TEACHER_WIDTH = 24


@dataclass(frozen=True)
class Case:
    """A layout and a pair of models.

    Attributes:
        replicate: replicas of the student over the ranks there are.
        vocabulary_parallel: whether the ranks of a replica share the heads.
        family, tied, vocabulary: of the student.
        teacher_vocabulary: where it differs from the student's, the extra vocabulary is masked.
        dtype: what the student computes in.
        frozen: patterns of parameters that stay.
        checkpointing, compiled: as in the config.
        router: weight of the routers' load-balancing loss.
        hidden: the loss of hidden states, `cosine` or `mse`; empty: none.
    """

    replicate: int = 1
    vocabulary_parallel: bool = False
    family: str = "llama"
    tied: bool = False
    vocabulary: int = VOCABULARY
    teacher_vocabulary: int = VOCABULARY
    implementation: str = "fused"
    dtype: torch.dtype = torch.float32
    frozen: str = ""
    checkpointing: str = "none"
    compiled: bool = False
    router: float = 0.0
    hidden: str = ""

    def model(self, seed: int = 0) -> nn.Module:
        """The tiny student, in train mode."""
        changes = {"tie_word_embeddings": self.tied, "vocab_size": self.vocabulary}
        model = tiny_model(self.family, seed=seed, **changes).train()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not self.frozen or self.frozen not in name)
        return model

    def teacher_head(self) -> Head:
        """A random head with a bias, a scale and a soft cap."""
        draw = torch.Generator().manual_seed(3)
        weight = torch.randn(self.teacher_vocabulary, TEACHER_WIDTH, generator=draw)
        return Head(weight, torch.randn(self.teacher_vocabulary, generator=draw), 0.9, 7.0)

    def loss(self) -> LossConfig:
        """A loss whose every part counts."""
        return LossConfig(
            divergence="jsd", temperature=2.0, ce_weight=0.5, memory_budget="1MiB", implementation=self.implementation,
            hidden_weight=0.7 if self.hidden else 0.0, hidden_loss=self.hidden or None,
        )  # fmt: skip

    def sharded(self, seed: int = 0) -> StudentModule:
        """The student module of this rank in this layout."""
        ranks, rank = dist.get_world_size(), dist.get_rank()
        layout = StudentLayout(ranks, self.replicate, rank, self.vocabulary_parallel)
        whole = self.teacher_head()
        start, stop = layout.teacher_ids(self.vocabulary, self.teacher_vocabulary)
        part = whole.rows(start, stop)
        head = Head(part.weight.clone(), part.bias.clone(), whole.scale, whole.softcap)
        model = self.model(seed)
        module = StudentModule(model, head, self.loss(), router_loss_of(model, self.router), ranks)
        shard_student(
            module, student_mesh("cpu", dist.group.WORLD, self.replicate), self.dtype, self.checkpointing,
            vocabulary_parallel=self.vocabulary_parallel, compiled=self.compiled,
        )  # fmt: skip
        return module

    def whole(self, ranks: int) -> StudentModule:
        """The same student in one process, which computes the micro-batches of all ranks."""
        model = self.model()
        return StudentModule(model, self.teacher_head(), self.loss(), router_loss_of(model, self.router), ranks)


def micro_batches(ranks: int, step: int) -> list[tuple[MicroBatch, Tensor]]:
    """One micro-batch of each rank, with rows of the teacher: of different sizes, and in odd steps none for the last
    rank."""
    draw = np.random.default_rng(step)
    batches = []
    for rank in range(ranks):
        if rank == ranks - 1 and step % 2:
            batches.append(empty_micro_batch(1, 8, 0))
            continue
        sequences = []
        for length in (9 + 2 * rank, 14 + step):
            ids = draw.integers(0, VOCABULARY, length).astype(np.int32)  # id 0 too, which is the padding id
            labels = np.append(ids[1:], -100).astype(np.int32)
            labels[: 1 + rank] = -100
            sequences.append(Sequence(ids, labels, (length,)))
        batches.append(collate(sequences, 0))
    states = torch.Generator().manual_seed(step)
    return [(batch, torch.randn(len(batch.rows), TEACHER_WIDTH, generator=states)) for batch in batches]


def train_sharded(
    module: StudentModule, steps: range, optimizer: torch.optim.Optimizer, *, keep_gradients: bool = False
) -> list[tuple[float, float]]:
    """Train and return loss and gradient norm of each step, over all ranks."""
    figures = []
    for step in steps:
        batches = micro_batches(dist.get_world_size(), step)
        batch, states = batches[dist.get_rank()]
        loss, out = module(batch, states, _rows(batches))
        loss.backward()
        total = out.loss.detach().double()
        dist.all_reduce(total)
        figures.append((total.item(), float(clip_gradients(module, 1.0))))
        optimizer.step()
        if not keep_gradients:
            optimizer.zero_grad(set_to_none=True)
    return figures


def train_whole(module: StudentModule, ranks: int, steps: range) -> list[tuple[float, float]]:
    """The same in one process, which computes the micro-batches of all ranks one after the other."""
    optimizer, figures = build_optimizer(module, TrainConfig(learning_rate=1e-3)), []
    for step in steps:
        batches, total = micro_batches(ranks, step), 0.0
        for batch, states in batches:
            loss, _ = module(batch, states, _rows(batches))
            loss.backward()
            total += loss.item()
        figures.append((total, float(clip_gradients(module, 1.0))))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return figures


def whole_gradients(module: StudentModule, step: int, *, gather: bool = True) -> dict[str, Tensor]:
    """This step's gradients of a sharded module, put together (or left as they are), by name."""
    batches = micro_batches(dist.get_world_size(), step)
    batch, states = batches[dist.get_rank()]
    module(batch, states, _rows(batches))[0].backward()
    found = {
        name: parameter.grad.full_tensor() if gather else parameter.grad
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    module.zero_grad(set_to_none=True)
    return found


def reference_gradients(module: StudentModule, ranks: int, step: int) -> dict[str, Tensor]:
    """The same from one process."""
    batches = micro_batches(ranks, step)
    for batch, states in batches:
        module(batch, states, _rows(batches))[0].backward()
    found = {name: parameter.grad.clone() for name, parameter in module.named_parameters() if parameter.requires_grad}
    module.zero_grad(set_to_none=True)
    return found


def compare(case: Case) -> None:
    """Assert that gradients, losses and gradient norms of a layout over all ranks are those of one process."""
    if case.dtype != torch.float32:
        _compare_low_precision(case)
        return
    ranks = dist.get_world_size()
    module, whole = case.sharded(), case.whole(ranks)
    for step in (0, 1):
        ours, theirs = whole_gradients(module, step), reference_gradients(whole, ranks, step)
        assert ours.keys() == theirs.keys()
        for name, gradient in ours.items():
            assert _error(gradient, theirs[name]) < 1e-5, name
    steps = range(4)
    ours = train_sharded(module, steps, build_optimizer(module, TrainConfig(learning_rate=1e-3)))
    for mine, other in zip(ours, train_whole(whole, ranks, steps), strict=True):
        assert mine == pytest.approx(other, rel=1e-5)


def _compare_low_precision(case: Case) -> None:
    """No layout is further from the float32 gradient than plain FSDP in the same dtype."""
    plain = replace(case, replicate=1, vocabulary_parallel=False)
    for step in (0, 1):
        truth = _flat(reference_gradients(case.whole(dist.get_world_size()), dist.get_world_size(), step))
        ours, theirs = (_error(_flat(whole_gradients(one.sharded(), step)), truth) for one in (case, plain))
        assert ours < 1.2 * theirs + 1e-3


def _error(tensor: Tensor, reference: Tensor) -> float:
    return ((tensor - reference).norm() / reference.norm().clamp_min(1e-12)).item()


def _flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


def _rows(batches: list[tuple[MicroBatch, Tensor]]) -> int:
    return sum(batch.supervised_count for batch, _ in batches)
