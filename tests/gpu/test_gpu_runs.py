"""Whole tiny runs on one GPU: teacher and student share it as two processes, with gloo between them."""

from __future__ import annotations

import json

import pytest

from tests.support.runs import disaggkd, losses, write_config


@pytest.mark.timeout(300)
def test_disaggregated_and_colocated_losses_on_one_gpu(device, tmp_path):
    config = write_config(tmp_path / "run.yaml", launch__device=device.type, train__steps=6, train__eval_every=0,
                          train__save_every=0)  # fmt: skip
    found = {}
    for mode in ("disaggregated", "colocated"):
        run_dir = tmp_path / mode
        code, output = disaggkd("run", str(config), f"mode={mode}", f"run_dir={run_dir}", "--restarts", "0")
        assert code == 0, output
        placed = json.loads((run_dir / "environment.json").read_text())["placement"]["device"]
        assert placed.startswith(device.type)
        found[mode] = losses(run_dir)
    assert len(found["disaggregated"]) == 6
    assert found["disaggregated"] == pytest.approx(found["colocated"], rel=1e-4)
