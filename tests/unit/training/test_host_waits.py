"""A training micro-batch never makes the host wait for a GPU: tensors without values raise wherever one is read.

No GPU is used. Copies are watched on a fake GPU; torch without CUDA cannot index there, so the module computes on fake
tensors of a CPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from disaggkd_cli.config import LossConfig
from disaggkd_cli.data import MicroBatch, Sequence, collate
from disaggkd_cli.losses import DIVERGENCES, Head, LossOutput, fused
from disaggkd_cli.losses.arguments import LossArgumentError
from disaggkd_cli.losses.passes import run_passes
from disaggkd_cli.training import student_module
from disaggkd_cli.training.student_module import StudentModule

GPU = torch.device("cuda", 0)
VOCABULARY, WIDTH, TEACHER_WIDTH = 96, 8, 12


class HostWait(AssertionError):
    """The host would have waited for the GPU."""


class NoHostWaits(TorchDispatchMode):
    """Raises at copies that wait: to the host, or from memory that is not pinned. The rest fake tensors refuse
    themselves: they have no values to read, count or index by."""

    def __init__(self, pinned: list[int]) -> None:
        super().__init__()
        self.pinned = pinned

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        result = function(*arguments, **keywords)
        if function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = arguments[1] if function is torch.ops.aten.copy_.default else arguments[0]
            devices = source.device.type, result.device.type
            if devices == ("cuda", "cpu"):
                raise HostWait(f"{function} reads from the GPU")
            if devices == ("cpu", "cuda") and source.numel() not in self.pinned:
                raise HostWait(f"{function} copies {list(source.shape)} from memory that is not pinned")
        return result


@pytest.fixture
def gpu(monkeypatch):
    """Fake tensors on a GPU that is not there."""
    pinned: list[int] = []

    def pin(tensor):
        pinned.append(tensor.numel())
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, NoHostWaits(pinned):
        yield fake


def _batch() -> MicroBatch:
    draw = np.random.default_rng(0)
    sequences = []
    for length in (9, 14):
        labels = draw.integers(0, VOCABULARY, length).astype(np.int32)
        labels[:4] = -100
        sequences.append(Sequence(draw.integers(0, VOCABULARY, length).astype(np.int32), labels, (length - 3, 3)))
    return collate(sequences, pad_id=0)


@pytest.fixture
def student(monkeypatch):
    """A student module whose backbone computes nothing: the waits of this package, not those of a model."""

    def build(**options) -> StudentModule:
        kind = dict(dtype=torch.bfloat16)
        model = nn.Module()
        model.head = nn.Module()
        model.head.weight = nn.Parameter(torch.zeros(VOCABULARY, WIDTH, **kind))
        teacher_head = Head(torch.zeros(VOCABULARY, TEACHER_WIDTH, dtype=torch.bfloat16))
        return StudentModule(model, teacher_head, LossConfig(**options))

    monkeypatch.setattr(student_module, "backbone_of", lambda model: model)

    def states_of(backbone, ids, positions, documents):
        return torch.zeros(*ids.shape, WIDTH, dtype=torch.bfloat16)

    monkeypatch.setattr(student_module, "hidden_states", states_of)
    monkeypatch.setattr(student_module, "head_of", lambda model: Head(model.head.weight))
    return build


@pytest.fixture
def batch() -> MicroBatch:
    """Collated before tensors are fake: what is found in it later than that, raises."""
    found = _batch()
    assert found.token_mask.shape == found.position_ids.shape  # of lengths on the CPU, whose values fake tensors lack
    return found


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_micro_batch_waits_for_nothing(batch, gpu, student, divergence, monkeypatch):
    expected = batch.supervised_count
    module = student(divergence=divergence, ce_weight=0.5, temperature=2.0)
    teacher_hidden = torch.zeros(expected, TEACHER_WIDTH, dtype=torch.bfloat16)
    # Torch's engine needs a GPU's driver even to record a fake tensor's backward. The loss computes its gradients in
    # forward, and does so here: it is told that they are wanted.
    monkeypatch.setattr(torch, "is_grad_enabled", lambda: True)
    passes = []
    monkeypatch.setattr(fused, "run_passes", lambda problem: passes.append(problem) or run_passes(problem))
    with torch.no_grad():
        loss, out = module(batch, teacher_hidden, 100)
    assert passes[0].gradients and passes[0].weight_gradient
    assert isinstance(out, LossOutput)
    with pytest.raises(DataDependentOutputException):
        float(loss)


def test_a_batch_travels_in_copies_that_nobody_waits_for(batch, gpu):
    there = batch.to(GPU)
    for name in ("input_ids", "labels", "position_ids", "rows", "row_labels", "token_mask"):
        assert getattr(there, name).device == GPU and getattr(there, name).shape == getattr(batch, name).shape, name
    assert (there.supervised_count, there.largest_label) == (batch.supervised_count, batch.largest_label)
    with pytest.raises(HostWait, match="reads from the GPU"):
        there.labels.cpu()


def test_each_kind_of_wait_is_seen(gpu):
    there = torch.zeros(4, dtype=torch.int64, device=GPU)
    waits = {
        "item": lambda: there.sum().item(),
        "tolist": lambda: there.tolist(),
        "nonzero": lambda: there.nonzero(),
        "mask": lambda: there[there == 0],
        "cpu": lambda: there.cpu(),
        "pageable": lambda: torch.zeros(7).to(GPU),
        "made from a list": lambda: torch.tensor([1, 2, 3], device=GPU),
    }
    silent = []
    for name, wait in waits.items():
        try:
            wait()
            silent.append(name)
        except Exception:  # noqa: BLE001  fake tensors raise classes of their own for each
            pass
    assert silent in ([], ["made from a list"])


def test_a_label_beyond_the_vocabulary_is_refused_on_the_host(student):
    batch = _batch()
    labels = batch.labels.clone()
    labels[0, 5] = VOCABULARY
    batch = replace(batch, labels=labels)
    module = SimpleNamespace(model=SimpleNamespace(head=nn.Linear(WIDTH, VOCABULARY)))
    with pytest.raises(LossArgumentError, match=f"label {VOCABULARY} is no token id.*0 and {VOCABULARY - 1}"):
        StudentModule._check_labels(module, batch)
