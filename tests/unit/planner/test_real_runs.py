"""Real runs on this machine: bytes on the wire are those that the plan says, exactly; how a calibrated plan
meets the step time is printed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from disaggkd_cli.config import load
from disaggkd_cli.planner.inputs import workload_of
from disaggkd_cli.planner.measure import compare, fit, read_run

ROOT = Path(__file__).parents[3]
CONFIG = {
    "teacher": {"model": str(ROOT / "tests" / "assets" / "tiny-austen"), "dtype": "float32"},
    "student": {"from_teacher": {"layers": "every_2"}},
    "data": {"train": "builtin:pydoc", "sequence_length": 48, "eval_sequences": 8},
    "train": {"steps": 12, "micro_batch_sequences": 4, "warmup_steps": 2, "learning_rate": 1.0e-3, "eval_every": 6},
    "transport": {"timeout": 20, "teacher_wait": 60},
    "launch": {"threads": 1, "device": "cpu"},
}


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float8"])
def test_bytes_on_the_wire_are_exact(tmp_path, wire):
    config_file = tmp_path / "config.yaml"
    config_file.write_text(yaml.safe_dump(CONFIG))
    overrides = [f"run_dir={tmp_path / 'run'}", f"transport.dtype={wire}"]
    command = [sys.executable, "-m", "disaggkd_cli", "run", str(config_file), *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    work = workload_of(load(config_file, overrides))
    recorded = read_run(tmp_path / "run")
    wired = next(one for one in compare(work, recorded) if one.name == "hidden states received")
    assert wired.measured > 0
    assert wired.predicted == wired.measured
    fitted = fit(work, recorded, "run")
    calibrated = work.with_(
        efficiency=type(work.efficiency)(fitted["teacher_time"], fitted["student_time"], jitter=0.0)
    )
    step = next(one for one in compare(calibrated, recorded) if one.name == "step")
    print(f"step time: {step.predicted:.3g} s planned, {step.measured:.3g} s measured, off by {step.error:+.0%}")
    assert step.predicted > 0 and step.measured > 0
