"""The teacher's own loss on held-out text, and what is made of it before training begins."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from disaggkd_cli.config import LossConfig
from disaggkd_cli.data import Sequence, collate
from disaggkd_cli.models import backbone_of, head_of, hidden_states
from disaggkd_cli.training.evaluation import doubts_about_teacher, no_better_than_guessing
from disaggkd_cli.training.student_module import StudentModule
from tests.support.models import VOCABULARY, tiny_model


def batch_of(generator):
    sequences = []
    for length in (9, 5):
        ids = torch.randint(0, VOCABULARY, (length,), generator=generator).numpy().astype(np.int32)
        labels = np.append(ids[1:], -100).astype(np.int32)
        labels[:2] = -100
        sequences.append(Sequence(ids, labels, (length,)))
    return collate(sequences, 0)


@pytest.mark.parametrize("implementation", ["fused", "full"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere"])
def test_the_teachers_loss_is_that_of_its_own_logits(family, implementation):
    generator = torch.Generator().manual_seed(7)
    teacher, student = tiny_model(family, seed=1).double(), tiny_model("llama", seed=2)
    batch = batch_of(generator)
    logits = teacher(input_ids=batch.input_ids, position_ids=batch.position_ids).logits.reshape(-1, VOCABULARY)
    truth = F.cross_entropy(logits[batch.rows], batch.row_labels, reduction="sum") / 50
    states = hidden_states(backbone_of(teacher), batch.input_ids, batch.position_ids)
    hidden = states.reshape(-1, states.shape[-1])[batch.rows].float().detach()
    loss = LossConfig(implementation=implementation, temperature=3.0, ce_weight=0.0)
    module = StudentModule(student, head_of(teacher.float()).detached(), loss)
    with torch.no_grad():
        assert module(batch, hidden, 50)[1].teacher_ce == 0
        out = module(batch, hidden, 50, evaluation=True)[1]
    assert out.teacher_ce.item() == pytest.approx(truth.item(), rel=1e-5)


def figures(teacher, student):
    return {"eval_teacher_lm_loss": teacher, "eval_lm_loss": student}


def test_random_weights_and_zeros_are_guesses():
    for seed in range(3):
        torch.manual_seed(seed)
        model = tiny_model("llama", seed=seed, vocab_size=2048)
        ids = torch.randint(0, 2048, (4, 32))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.mul_(0.1)
            logits = model(input_ids=ids).logits
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, 2048), ids[:, 1:].reshape(-1)).item()
        assert no_better_than_guessing(loss, 2048)
    assert no_better_than_guessing(math.log(2048), 2048)
    assert not no_better_than_guessing(0.9 * math.log(2048), 2048)


def test_doubts_are_named():
    assert "no better than guessing" in doubts_about_teacher(figures(7.62, 3.0), 2048)[0]
    assert "no better than guessing" in doubts_about_teacher(figures(7.7, 9.0), 2048)[0]
    worse = doubts_about_teacher(figures(3.0, 2.0), 2048)
    assert len(worse) == 1 and "perplexity 20.1 against 7.4" in worse[0]
    assert doubts_about_teacher(figures(3.0, 3.0), 2048) == []
    assert doubts_about_teacher(figures(3.0, 5.0), 2048) == []
