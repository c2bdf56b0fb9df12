"""What a run leaves on disk, and what it refuses to overwrite."""

import errno
import json
import os

import pytest

from disaggkd_cli.config import LogConfig
from disaggkd_cli.errors import UserError
from disaggkd_cli.training.metrics import MetricsLog, read_metrics
from disaggkd_cli.training.run_directory import RunDirectory, Status, clear, describe, hold, prepare, read_status


def test_a_fresh_directory(tmp_path):
    directory = prepare(tmp_path / "runs" / "a", "seed: 1\n", resume=False)
    assert directory.config.read_text() == "seed: 1\n"
    Status("running", last_step=3).write(directory)
    found = read_status(directory)
    assert (found.state, found.last_step, found.process) == ("running", 3, os.getpid())
    assert found.alive_here()


def test_another_run_is_not_overwritten(tmp_path):
    directory = prepare(tmp_path / "a", "", resume=False)
    Status("finished").write(directory)
    with pytest.raises(UserError, match="already holds a run .finished after step 0.; add --resume auto"):
        prepare(tmp_path / "a", "", resume=False)
    prepare(tmp_path / "a", "", resume=True)


def test_a_start_that_failed_before_its_first_step_is_in_nobodys_way(tmp_path):
    directory = prepare(tmp_path, "seed: 1\n", resume=False)
    Status("failed", exit_code=2).write(directory)
    directory.metrics.write_text('{"step": 0, "eval_kd": 1.0}\n')
    (directory.logs / "student_0.log").write_text("why it failed\n")
    prepare(tmp_path, "seed: 2\n", resume=False)
    assert sorted(os.listdir(tmp_path)) == ["config.yaml", "logs"]
    assert os.listdir(directory.logs) == ["student_0.log"]


@pytest.mark.parametrize(
    ("status", "path", "text"),
    [
        (Status("failed", last_step=3), None, ""),
        (Status("running"), None, ""),
        (Status("finished"), None, ""),
        (Status("stopped", resumable=True), None, ""),
        (Status("failed", resumable=True), None, ""),
        (Status("failed"), "checkpoints/step_00000001/manifest.json", ""),
        (Status("failed"), "metrics.jsonl", '{"step": 1, "loss": 2.0}\n{"st'),
        (Status("failed"), "student/config.json", ""),
    ],
)
def test_whatever_was_trained_or_may_go_on_stays(tmp_path, status, path, text):
    directory = prepare(tmp_path, "", resume=False)
    status.write(directory)
    if path:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    with pytest.raises(UserError, match=r"already holds a run \(.*--overwrite to delete it"):
        prepare(tmp_path, "", resume=False)


def test_an_overwritten_run_leaves_what_others_put_there(tmp_path):
    directory = prepare(tmp_path, "", resume=False)
    Status("finished", last_step=30).write(directory)
    (directory.checkpoints / "step_00000030").mkdir(parents=True)
    (tmp_path / "student_step_15").mkdir()
    (tmp_path / "layers.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    (directory.logs / "student_0.log").write_text("")
    assert describe(directory) == "finished after step 30"
    clear(directory)
    assert sorted(os.listdir(tmp_path)) == ["logs", "notes.txt"]
    assert not os.listdir(directory.logs)


def test_a_run_that_goes_is_not_deleted(tmp_path):
    directory = prepare(tmp_path, "", resume=False)
    Status("running").write(directory)
    with pytest.raises(UserError, match=f"still goes \\(process {os.getpid()}\\)"):
        clear(directory)
    # A process that took the number over, a process of another machine, and one that is gone are not that run.
    facts = json.loads(directory.status.read_text())
    for other in ({"written": 1000.0}, {"host": "elsewhere"}, {"process": 2**22 + 1}):
        directory.status.write_text(json.dumps({**facts, **other}))
        assert not read_status(directory).alive_here()
    clear(directory)


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


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text, []),
        (lambda text: text + '{"step": 6, "lo', []),  # killed in mid-write
        (lambda text: "".join(text.splitlines(keepends=True)[:4]), ["no lines of steps 3-4,"]),
        (lambda text: text.replace("2.0}", "2.0"), ["1 damaged lines", "no lines of steps 2,"]),
        (lambda text: "NaN\n[1]\n{}\n" + '{"step": "3"}\n' + text, ["4 damaged lines"]),
        (lambda text: text.replace("1.0", "NaN"), []),
        (lambda text: text.replace('"step": 4', '"step": NaN'), ["2 damaged lines", "no lines of steps 4,"]),
        (lambda text: "\x00\xff" * 9 + "\n" + text, ["1 damaged lines"]),
    ],
)
def test_damaged_metrics_are_said_and_the_rest_is_kept(tmp_path, damage, said):
    directory = prepare(tmp_path, "", resume=False)
    log = MetricsLog(directory, 0, LogConfig())
    for step in range(1, 6):
        log.write(step, {"loss": float(step)})
        log.write(step, {"eval_kd": 1.0})
    log.close()
    directory.metrics.write_bytes(damage(directory.metrics.read_text()).encode("latin-1"))
    heard: list[str] = []
    MetricsLog(directory, 4, LogConfig(), heard.append).close()
    assert len(heard) == len(said) and all(words in line for words, line in zip(said, heard, strict=True)), heard
    kept = [line["step"] for line in read_metrics(directory.metrics) if "loss" in line]
    assert kept == [step for step in kept if step <= 4]


def test_no_leftovers(tmp_path):
    directory = prepare(tmp_path / "a", "", resume=False)
    Status("running").write(directory)
    assert sorted(os.listdir(directory.root)) == ["config.yaml", "logs", "status.json"]


def test_a_run_directory_is_held_by_one(tmp_path):
    held = hold(tmp_path / "run", "`disaggkd run`")
    with pytest.raises(UserError, match=rf"run_dir: .*run is taken by `disaggkd run` \(process {os.getpid()}\)"):
        hold(tmp_path / "run", "another")
    held.close()
    held.close()
    hold(tmp_path / "run", "another").close()


def test_where_there_are_no_locks_that_is_said_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("disaggkd_cli.locks.fcntl.flock", no_locks)
    assert hold(tmp_path / "run", "`disaggkd run`") is None
    assert "cannot be locked (No locks available)" in capsys.readouterr().err


def test_deleting_a_run_leaves_the_lock_that_is_held(tmp_path):
    directory = prepare(tmp_path / "run", "", resume=False)
    Status("finished", last_step=20).write(directory)
    held = hold(tmp_path / "run", "a")
    clear(directory)
    with pytest.raises(UserError, match="is taken by"):
        hold(tmp_path / "run", "b")
    held.close()
