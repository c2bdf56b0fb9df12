"""`bench loss` on a small shape: its rows, its peers, its errors."""

from __future__ import annotations

import json

import pytest

from disaggkd_cli.bench.loss import LossBenchOptions, print_table, run
from disaggkd_cli.errors import UserError

SMALL = dict(rows=96, vocabulary=700, student_width=24, teacher_width=40, repeats=1, error_rows=32, device="cpu")


@pytest.mark.timeout(120)
def test_rows_and_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "180")
    result = run(LossBenchOptions(**SMALL, divergences=("forward_kl", "jsd"), budgets=("1MiB",), peers=True))
    json.dumps(result)
    rows = {(row["implementation"], row["divergence"], row["dtype"]): row for row in result["rows"]}
    for dtype in ("float32", "bfloat16"):
        fused, full = rows["fused", "forward_kl", dtype], rows["full", "forward_kl", dtype]
        assert 0 < fused["seconds"] < float("inf")
        assert fused["scratch_bytes"] <= 2**20
        assert fused["gradient_error"] <= full["gradient_error"] + 2e-6
        assert fused["gradient_error_near"] <= 2e-3
        assert ("fused", "jsd", dtype) in rows
    assert ("gemm_floor", "", "float32") in rows
    named = {row["implementation"] for row in result["rows"]} | {peer["implementation"] for peer in result["absent"]}
    assert {"liger_chunked_1024", "trl_chunked", "torch_linear_cross_entropy"} <= named
    print_table(result)
    assert "gemm_floor" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(divergences=("kl",)), "divergence 'kl' is unknown"),
        (dict(dtypes=("int8",)), "dtype 'int8' can't be measured"),
        (dict(device="tpu"), "device 'tpu' is not here"),
    ],
)
def test_wrong_options(changes, message):
    with pytest.raises(UserError, match=message):
        run(LossBenchOptions(**{**SMALL, **changes}))
