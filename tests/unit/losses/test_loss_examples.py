"""The examples run, and train as they would with full logits."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from disaggkd_cli.losses import reference_kd_loss

EXAMPLES = Path(__file__).parents[3] / "examples"


def _printed_losses(name: str, arguments: list[str], monkeypatch, capsys, loss=None) -> list[float]:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if loss is not None:
        monkeypatch.setattr(module, "fused_kd_loss", loss)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    module.main()
    lines = capsys.readouterr().out.splitlines()
    if name == "plain_loop":
        return [float(line.split()[3]) for line in lines]
    return [float(word) for word in next(line for line in lines if line.startswith("losses")).split()[1:]]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name, arguments",
    [("plain_loop", ["--steps", "4"]), ("hf_trainer", ["--steps", "4", "--output-dir", "{directory}"])],
)
def test_an_example_trains_as_with_full_logits(name, arguments, monkeypatch, capsys, tmp_path):
    arguments = [argument.format(directory=tmp_path) for argument in arguments]
    fused = _printed_losses(name, arguments, monkeypatch, capsys)
    full = _printed_losses(name, arguments, monkeypatch, capsys, reference_kd_loss)
    assert len(fused) == 4 and len(set(fused)) == 4
    assert fused == pytest.approx(full, abs=2e-4)
