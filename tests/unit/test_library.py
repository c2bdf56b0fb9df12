"""`import disaggkd`: the library's front door, without torch until it is needed."""

import subprocess
import sys
from pathlib import Path

import pytest

import disaggkd
from disaggkd_cli import __version__


def test_importing_it_and_planning_imports_no_torch():
    code = """
import sys, disaggkd
plan = disaggkd.plan("configs/qwen3.5-35b-a3b-to-9b.yaml", "hardware.gpu=H200-SXM")
assert plan["recommendation"]["mode"] and "disaggregated_fused" in plan["modes"]
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_loss_is_the_one_of_the_package():
    from disaggkd_cli import losses

    assert disaggkd.fused_kd_loss is losses.fused_kd_loss
    assert disaggkd.Head is losses.Head
    assert set(disaggkd.__all__) <= set(dir(disaggkd))


def test_run_is_the_command(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("train: {stepz: 3}\n")
    with pytest.raises(Exception, match="train.stepz: there is no such key"):
        disaggkd.run(str(config))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'fused_loss'"):
        _ = disaggkd.fused_loss


def test_one_version():
    assert f'version = "{__version__}"' in (Path(__file__).parents[2] / "pyproject.toml").read_text()
