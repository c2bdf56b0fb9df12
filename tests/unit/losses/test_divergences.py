"""Entries of divergences: what each says of itself holds, for those that are there and those to come."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from disaggkd_cli.losses.divergences import DIVERGENCES, divergence_named

PAGE = Path(__file__).parents[3] / "docs" / "loss.md"


def _inputs(seed: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(9, 23, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(2)]


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_gradient_and_the_value_are_those_of_the_definition(name, seed):
    entry, beta = divergence_named(name), 0.3
    w, u = _inputs(seed)
    log_p, log_q = w.log_softmax(-1), u.log_softmax(-1)
    rows = entry.of_rows(log_p, log_q, beta)
    (expected,) = torch.autograd.grad(rows.sum(), u)
    p, q = log_p.exp(), log_q.exp()
    assert (entry.terms is None) != (entry.from_kl is None)
    if entry.terms is not None:
        value, baseline = (term.sum(-1) for term in entry.terms(p, q, log_p, log_q, beta))
    else:
        forward, baseline = (p * (log_p - log_q)).sum(-1), (q * (log_q - log_p)).sum(-1)
        # A KL that the first pass need not sum must not be used.
        forward = forward if entry.needs_forward_kl else forward * float("nan")
        baseline = baseline if entry.needs_reverse_kl else baseline * float("nan")
        value = entry.from_kl(forward, baseline, beta)
    torch.testing.assert_close(value, rows, rtol=1e-10, atol=1e-12)
    found = entry.gradient(p, q, log_p, log_q, beta, baseline[:, None])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_beta_matters_where_it_is_needed_and_nowhere_else(name, seed):
    entry = divergence_named(name)
    log_p, log_q = (logits.detach().log_softmax(-1) for logits in _inputs(seed))
    values = [entry.of_rows(log_p, log_q, beta) for beta in (0.25, 0.5)]
    assert torch.equal(*values) != entry.needs_beta
    for beta in entry.zero_at:
        assert entry.of_rows(log_p, log_q, beta + (1e-9 if beta == 0 else -1e-9)).abs().max() < 1e-6
        assert f"beta={beta}" in entry.wrong_beta(beta)
    assert entry.wrong_beta(0.5) is None
    assert bool(entry.wrong_beta(1.5)) == entry.needs_beta


def test_passes_over_the_logits():
    """One for the statistics, one for the gradients, and one between where value and baseline need the normalisers."""
    three = {"jsd", "skewed_forward_kl", "skewed_reverse_kl", "total_variation"}
    for name in DIVERGENCES:
        assert divergence_named(name).passes() == (3 if name in three else 2)
        assert divergence_named(name).passes(gradients=False) == (2 if name in three else 1)


def test_the_page_defines_each():
    text = PAGE.read_text()
    assert [name for name in DIVERGENCES if f"| `{name}` |" not in text] == []
