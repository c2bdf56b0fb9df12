"""The student module with a loss of hidden states: value, gradients, figures, and today's bits at a weight of 0."""

import numpy as np
import pytest
import torch

from disaggkd_cli.config import LossConfig, TrainConfig
from disaggkd_cli.data import Sequence, collate
from disaggkd_cli.losses import Head, reference_kd_loss
from disaggkd_cli.models import backbone_of, head_of, hidden_states
from disaggkd_cli.planner.memory.projection import COPIES
from disaggkd_cli.training.optimizer import build_optimizer
from disaggkd_cli.training.student_module import StudentModule
from tests.support.models import VOCABULARY, tiny_model

TEACHER_WIDTH, ROWS = 23, 71  # rows of the whole step


def module(**changes):
    head = Head(torch.randn(VOCABULARY, TEACHER_WIDTH, generator=torch.Generator().manual_seed(1)))
    return StudentModule(tiny_model("llama"), head, LossConfig(**changes), seed=5)


def batch_of(*lengths):
    sequences = []
    for length in lengths:
        ids = np.random.default_rng().integers(3, VOCABULARY, length).astype(np.int32)
        labels = np.append(ids[1:], -100).astype(np.int32)
        labels[: length // 3] = -100
        sequences.append(Sequence(ids, labels, (length,)))
    return collate(sequences, 0)


def rows_of(student, batch):
    states = hidden_states(backbone_of(student.model), batch.input_ids, batch.position_ids)
    return states.reshape(-1, states.shape[-1])[batch.rows]


@pytest.mark.parametrize("implementation", ["fused", "full"])
@pytest.mark.parametrize("kind", [None, "cosine", "mse"])
def test_it_is_added_over_supervised_rows_with_the_divergences_normaliser(kind, implementation):
    batch, weight = batch_of(9, 14), 1.7
    student = module(hidden_weight=weight, hidden_loss=kind, implementation=implementation).double()
    student._teacher_head = (Head(student.teacher_head.weight.double()),)
    teacher = torch.randn(len(batch.rows), TEACHER_WIDTH, dtype=torch.float64)
    loss, out = student(batch, teacher, ROWS)
    loss.backward()
    got = {name: parameter.grad.clone() for name, parameter in student.named_parameters()}
    student.zero_grad()

    rows = rows_of(student, batch)
    projected = rows @ student.projection.T
    if kind == "mse":
        distance = ((projected - teacher) ** 2).mean(1)
    else:
        distance = 1 - (projected * teacher).sum(1) / (projected.norm(dim=1) * teacher.norm(dim=1))
    hidden = distance.sum() / ROWS
    kd = reference_kd_loss(rows, head_of(student.model), teacher, student.teacher_head, None, num_tokens=ROWS)
    wanted = kd.loss + weight * hidden
    wanted.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(out.hidden, hidden.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(out.loss.detach(), wanted.detach(), rtol=1e-10, atol=1e-12)
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-7, atol=1e-11)
    assert got["projection"].norm() > 0


def test_a_weight_of_zero_is_no_projection_and_no_other_bit():
    batch = batch_of(11)
    plain, zero = module(), module(hidden_weight=0.0)
    assert [name for name, _ in zero.named_parameters()] == [name for name, _ in plain.named_parameters()]
    teacher = torch.randn(len(batch.rows), TEACHER_WIDTH)
    (loss, out), (other, _) = plain(batch, teacher, ROWS), zero(batch, teacher, ROWS)
    assert torch.equal(loss, other) and out.hidden == 0 and zero.projection is None


def test_written_rows_count_and_evaluation_reports_it():
    sequences = batch_of(9, 12)
    student = module(hidden_weight=0.5, hidden_loss="mse")
    ids = np.random.default_rng().integers(3, VOCABULARY, 8).astype(np.int32)
    written = Sequence(ids, np.append(ids[1:], -100).astype(np.int32), (8,), True)
    for batch in (collate([written], 0), sequences):
        teacher = torch.randn(len(batch.rows), TEACHER_WIDTH)
        wanted = ((rows_of(student, batch) @ student.projection.T - teacher) ** 2).mean(1).sum() / ROWS
        for evaluation in (False, True):
            _, out = student(batch, teacher, ROWS, evaluation=evaluation)
            torch.testing.assert_close(out.hidden, wanted.detach(), rtol=1e-5, atol=1e-7)


def test_the_optimizer_trains_the_projection():
    student = module(hidden_weight=0.5)
    groups = build_optimizer(student, TrainConfig()).param_groups
    assert any(one is student.projection for group in groups for one in group["params"])
    again = module(hidden_weight=0.5)
    assert torch.equal(again.projection, student.projection), "a function of the seed"


@pytest.mark.parametrize("kind", ["cosine", "mse"])
def test_the_planners_count_of_rows_is_what_torch_allocates(kind):
    from disaggkd_cli.bench.peak import peak_extra_bytes
    from disaggkd_cli.losses.hidden import hidden_loss

    rows, width = 1024, 257
    student = torch.randn(rows, 3, requires_grad=True)
    teacher, projection = torch.randn(rows, width), torch.randn(width, 3, requires_grad=True)

    def work():
        hidden_loss(student, teacher, projection, kind, rows).backward()

    work()
    student.grad = projection.grad = None
    assert peak_extra_bytes(work, torch.device("cpu")) == pytest.approx(4 * COPIES[kind] * rows * width, rel=0.03)
