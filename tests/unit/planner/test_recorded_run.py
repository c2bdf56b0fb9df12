"""A plan beside a recorded run: bytes compared exactly, times fitted so that the plan gives the recorded ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from disaggkd_cli.config import Config, load
from disaggkd_cli.errors import UserError
from disaggkd_cli.planner.inputs import workload_of

from .planner_toys import toy_work

REFERENCE = Path(__file__).parents[3] / "configs" / "qwen3.5-35b-a3b-to-9b.yaml"


@pytest.fixture
def reference() -> Config:
    return load(REFERENCE)


def _write_run(directory: Path, teachers: bool) -> None:
    lines = []
    for step in range(1, 11):
        line = {
            "step": step,
            "loss": 1.0,
            "step_seconds": 2.0,
            "stall_seconds": 0.5,
            "supervised_tokens": 1000,
            "peak_memory_bytes": 5_000_000,
            "tokens_per_second": 1.0,
        }
        if teachers:  # whose totals count evaluations too
            line["received_bytes"] = 1000 * 32
            line["teachers"] = {
                "teacher 0": {"rows": 1500 * step, "received_bytes": 1500 * step * 32, "idle_share": 0.25}
            }
        lines.append(json.dumps(line))
    (directory / "metrics.jsonl").write_text(
        "\n".join([*lines, json.dumps({"step": 10, "eval_kd": 1.0}), '{"step": 11, "lo'])
    )


def test_measure_compares_bytes_exactly(tmp_path):
    from disaggkd_cli.planner.measure import compare, read_run

    _write_run(tmp_path, teachers=True)
    recorded = read_run(tmp_path)
    assert (recorded.steps, recorded.step_seconds, recorded.colocated) == (10, 2.0, False)
    rows = {one.name: one for one in compare(toy_work(), recorded)}
    assert rows["hidden states received"].error == 0


def test_calibration_reproduces_the_recorded_times(tmp_path, reference):
    from disaggkd_cli.planner.measure import fit, read_run
    from disaggkd_cli.planner.timing import colocated_teacher_time, student_time

    _write_run(tmp_path, teachers=False)
    work = toy_work(micro_batch_tokens=32 * 10**6)
    fitted = fit(work, read_run(tmp_path), str(tmp_path))
    changed = work.with_(efficiency=type(work.efficiency)(fitted["teacher_time"], fitted["student_time"]))
    assert student_time(changed).value == pytest.approx(1.5, rel=1e-3)
    assert colocated_teacher_time(changed).value == pytest.approx(0.5, rel=1e-3)
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(fitted))
    reference.hardware.calibration = str(path)
    assert workload_of(reference).efficiency.calibrated_from == str(tmp_path)
    path.write_text("student_tiem: 0.5")
    with pytest.raises(UserError, match="must be a mapping of"):
        workload_of(reference)


def test_too_short_a_run_is_refused(tmp_path):
    from disaggkd_cli.planner.measure import read_run

    with pytest.raises(UserError, match="cannot be read"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1}\n')
    with pytest.raises(UserError, match="at least 4"):
        read_run(tmp_path)
