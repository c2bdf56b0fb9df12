"""The loss of rows that the student wrote: the divergence like any row's, no cross-entropy, one common normaliser."""

import numpy as np
import pytest
import torch

from disaggkd_cli.config import LossConfig
from disaggkd_cli.data import Sequence, collate
from disaggkd_cli.losses import Head, reference_kd_loss
from disaggkd_cli.models import backbone_of, head_of, hidden_states
from disaggkd_cli.training.student_module import StudentModule
from tests.support.models import VOCABULARY, tiny_model

ROWS = 50  # of the whole step; other ranks have the rest


def sequence(length: int, written: bool, seed: int) -> Sequence:
    ids = np.random.default_rng(seed).integers(3, VOCABULARY, length).astype(np.int32)
    labels = np.append(ids[1:], -100).astype(np.int32)
    labels[: length // 3] = -100
    return Sequence(ids, labels, (length,), written)


def module(**changes) -> StudentModule:
    torch.manual_seed(1)
    head = Head(torch.randn(VOCABULARY, 24))
    return StudentModule(tiny_model("llama"), head, LossConfig(divergence="reverse_kl", ce_weight=0.7, **changes))


@pytest.mark.parametrize("implementation", ["fused", "full"])
@pytest.mark.parametrize("written", [(0, 0), (1, 0), (0, 1, 1), (1, 1)])
def test_written_rows_have_the_divergence_and_no_cross_entropy(written, implementation):
    batch = collate([sequence(9 + 4 * at, bool(one), at) for at, one in enumerate(written)], 0)
    student = module(implementation=implementation)
    hidden = torch.randn(len(batch.rows), 24)
    loss, out = student(batch, hidden, ROWS)
    loss.backward()
    gradient = student.model.get_input_embeddings().weight.grad.clone()

    student.zero_grad()
    states = hidden_states(backbone_of(student.model), batch.input_ids, batch.position_ids)
    rows = states.reshape(-1, states.shape[-1])[batch.rows]
    by_student = torch.tensor([bool(written[int(row) // batch.input_ids.shape[1]]) for row in batch.rows])
    labels = torch.where(by_student, -100, batch.row_labels)
    arguments = {"divergence": "reverse_kl", "num_tokens": ROWS}
    head = head_of(student.model)
    kd = reference_kd_loss(rows, head, hidden, student.teacher_head, None, **arguments)
    ce = reference_kd_loss(rows, head, hidden, student.teacher_head, labels, **arguments, kd_weight=0.0, ce_weight=0.7)
    wanted = kd.loss + ce.loss
    wanted.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, student.model.get_input_embeddings().weight.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(out.kd, kd.kd, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.ce * 0.7, ce.loss.detach(), rtol=1e-5, atol=1e-6)
    alone = (
        reference_kd_loss(rows[by_student], head, hidden[by_student], student.teacher_head, None, **arguments).kd
        if by_student.any()
        else torch.tensor(0.0)
    )
    torch.testing.assert_close(out.written_kd, alone, rtol=1e-5, atol=1e-6)


def test_a_step_of_nothing_but_empty_completions_has_a_loss_of_zero():
    silent = sequence(6, True, 0)
    silent.labels[:] = -100
    loss, out = module()(collate([silent], 0), torch.randn(0, 24), 0)
    loss.backward()
    assert loss.item() == 0 and out.written_kd.item() == 0
