"""What a run leaves on disk, and what it refuses to overwrite."""

import json
import os

import pytest

from disaggkd_cli.config import LogConfig
from disaggkd_cli.errors import UserError
from disaggkd_cli.training.metrics import MetricsLog, read_metrics
from disaggkd_cli.training.run_directory import RunDirectory, Status, prepare, read_status


def test_a_fresh_directory(tmp_path):
    directory = prepare(tmp_path / "runs" / "a", "seed: 1\n", resume=False)
    assert directory.config.read_text() == "seed: 1\n"
    Status("running", last_step=3).write(directory)
    assert read_status(directory) == Status("running", last_step=3)


def test_another_run_is_not_overwritten(tmp_path):
    directory = prepare(tmp_path / "a", "", resume=False)
    Status("finished").write(directory)
    with pytest.raises(UserError, match="already holds a run; add --resume auto"):
        prepare(tmp_path / "a", "", resume=False)
    prepare(tmp_path / "a", "", resume=True)


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "a").write_text("")
    for path in (tmp_path / "a", tmp_path / "a" / "b"):
        with pytest.raises(UserError, match="run_dir: .* is a file"):
            prepare(path, "", resume=False)


def test_a_place_that_cannot_be_written_to():
    # /proc refuses new directories even to root.
    with pytest.raises(UserError, match="cannot be written to"):
        prepare("/proc/runs", "", resume=False)


def test_damaged_status_is_no_status(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.status.write_text("{")
    assert read_status(directory) is None


def test_a_resumed_run_drops_the_lines_it_does_again(tmp_path):
    directory = prepare(tmp_path, "", resume=False)
    log = MetricsLog(directory, 0, LogConfig())
    for step in range(1, 6):
        log.write(step, {"loss": float(step)})
    log.close()
    with directory.metrics.open("a") as file:
        file.write('{"step": 6, "lo')
    resumed = MetricsLog(directory, 3, LogConfig())
    resumed.write(4, {"loss": 40.0})
    resumed.close()
    lines = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    assert lines == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}, {"step": 3, "loss": 3.0},
                     {"step": 4, "loss": 40.0}]  # fmt: skip
    assert read_metrics(directory.metrics) == lines


def test_no_leftovers(tmp_path):
    directory = prepare(tmp_path / "a", "", resume=False)
    Status("running").write(directory)
    assert sorted(os.listdir(directory.root)) == ["config.yaml", "logs", "status.json"]
