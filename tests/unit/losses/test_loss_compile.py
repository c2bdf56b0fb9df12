"""Compiled kernels equal eager ones; a caller that compiles, and a machine without compiler, are served."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest
import torch

from disaggkd_cli.losses import DIVERGENCES, Head, fused_kd_loss, pointwise

from .loss_cases import make_case, relative_error


def _compiled_against_eager(divergence: str, seed: int) -> None:
    # Two shapes, so that the compiled kernels meet sizes that they were not compiled for.
    for rows, vocabulary in ((37, 301), (64, 517)):
        compiled = make_case(
            seed, rows, vocabulary, dtype=torch.float32, bias=True, scale=0.7, softcap=5.0, masked=True
        )
        with torch.no_grad():  # ties: logits of some rows are what the bias says, and that repeats itself
            for hidden, head in (
                (compiled.student_hidden, compiled.student_head),
                (compiled.teacher_hidden, compiled.teacher_head),
            ):
                hidden[5:20] = 0
                head.bias.clamp_(max=0.5)
        eager, truth = compiled.copy(), compiled.copy(torch.float64)
        options = dict(divergence=divergence, temperature=2.0, ce_weight=0.5, beta=0.3, memory_budget=200_000)
        found = compiled.run(fused_kd_loss, compile_pointwise=True, **options)
        plain = eager.run(fused_kd_loss, compile_pointwise=False, **options)
        exact = truth.run(fused_kd_loss, compile_pointwise=False, **options)
        for out in (found, plain, exact):
            out.loss.backward()
        assert found.loss.item() == pytest.approx(exact.loss.item(), rel=1e-5)
        assert found.top1_agreement.item() == pytest.approx(exact.top1_agreement.item())
        for ours, theirs, best in zip(compiled.gradients(), eager.gradients(), truth.gradients(), strict=True):
            assert relative_error(ours, best) <= relative_error(theirs, best) + 2e-6


@pytest.mark.timeout(240)
def test_compiled_kernels_equal_eager_ones(seed):
    _compiled_against_eager("jsd", seed)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("divergence", [name for name in DIVERGENCES if name != "jsd"])
def test_compiled_kernels_of_every_divergence_equal_eager_ones(divergence, seed):
    _compiled_against_eager(divergence, seed)


def test_a_caller_may_be_compiled(seed):
    plain, traced = (make_case(seed, dtype=torch.float32) for _ in range(2))

    def step(hidden, weight, teacher_hidden, teacher_weight, labels):
        mixed = torch.tanh(hidden) * 2
        out = fused_kd_loss(mixed, Head(weight), teacher_hidden, Head(teacher_weight), labels, ce_weight=0.5)
        return out.loss * 3

    losses = []
    for case, function in ((plain, step), (traced, torch.compile(step, backend="eager"))):
        loss = function(
            case.student_hidden, case.student_head.weight, case.teacher_hidden, case.teacher_head.weight, case.labels
        )
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for ours, theirs in zip(traced.gradients(), plain.gradients(), strict=True):
        assert relative_error(ours, theirs) < 1e-6


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_without_a_compiler_the_kernels_run_eagerly_and_say_so_once(tmp_path):
    code = """
import warnings, torch
from disaggkd_cli.losses import Head, fused_kd_loss, reference_kd_loss
torch.manual_seed(0)
hidden, weight = torch.randn(9, 4), torch.randn(33, 4)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        found = fused_kd_loss(hidden, Head(weight), hidden + 1, Head(weight), compile_pointwise=True).loss
truth = reference_kd_loss(hidden, Head(weight), hidden + 1, Head(weight)).loss
said = [str(warning.message) for warning in caught if "eager torch" in str(warning.message)]
assert len(said) == 1 and "C++ compiler" in said[0], said
assert abs(found - truth) < 1e-5 * truth, (found, truth)
"""
    environment = {**os.environ, "CXX": "/nonexistent/g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_under_a_dispatch_mode_it_runs_eagerly_and_says_so_once(seed, monkeypatch):
    """Of a size that would be compiled: all products of a loss are counted, and none is missed."""
    from torch.utils.flop_counter import FlopCounterMode

    monkeypatch.setattr(pointwise, "COMPILE_FROM_ELEMENTS", 37 * 301)
    monkeypatch.setattr(pointwise, "_compiler_failed", False)
    monkeypatch.setattr(pointwise, "_compiled", None)  # whoever compiles here fails
    pointwise._warn_of_dispatch_mode.cache_clear()
    case = make_case(seed, 37, 301, dtype=torch.float32)
    plain = case.copy().run(fused_kd_loss, compile_pointwise=False).loss.item()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with FlopCounterMode(display=False) as counter:
                loss = case.copy().run(fused_kd_loss).loss
    assert loss.item() == plain
    assert counter.get_total_flops() == 2 * 37 * 301 * (3 * 7 + 11)
    assert len([warning for warning in caught if "dispatch mode" in str(warning.message)]) == 1
    with FlopCounterMode(display=False):
        assert case.copy().run(fused_kd_loss, compile_pointwise=True).loss.item() == plain


@pytest.mark.parametrize("failure", [RuntimeError("found no compiled frames"), TypeError("x"), OSError(28, "no space")])
def test_any_failure_of_the_compiler_ends_in_eager_torch(seed, monkeypatch, failure):
    def fails(*arguments):
        raise failure

    monkeypatch.setattr(pointwise, "_compiler_failed", False)
    monkeypatch.setattr(pointwise, "_compiled", lambda spec: (fails,) * 5)
    case = make_case(seed, 37, 301, dtype=torch.float32, bias=True, softcap=5.0)
    with pytest.warns(UserWarning, match="torch.compile does not work here"):
        found = case.copy().run(fused_kd_loss, compile_pointwise=True)
    assert found.loss.item() == pytest.approx(case.copy().run(fused_kd_loss, compile_pointwise=False).loss.item())


def test_memory_that_runs_out_is_no_failure_of_the_compiler(seed, monkeypatch):
    def fails(*arguments):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(pointwise, "_compiler_failed", False)
    monkeypatch.setattr(pointwise, "_compiled", lambda spec: (fails,) * 5)
    with pytest.raises(torch.OutOfMemoryError):
        make_case(seed, 37, 301, dtype=torch.float32).run(fused_kd_loss, compile_pointwise=True)
