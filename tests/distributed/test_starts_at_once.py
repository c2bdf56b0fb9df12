"""Of runs that are started at once in one run_dir, one goes and the others are refused; nothing of it is lost."""

import os

import pytest

from tests.support.runs import descendants, finish, losses, start, weights_sha256


@pytest.mark.slow
def test_of_three_starts_at_once_one_goes(reference_config, reference, tmp_path):
    run = tmp_path / "run"
    jobs = [start(["run", str(reference_config), f"run_dir={run}"]) for _ in range(3)]
    ended = [finish(job) for job in jobs]
    assert sorted(code for code, _ in ended) == [0, 2, 2], ended
    refused = [output for code, output in ended if code == 2]
    assert all("is taken by `disaggkd run` (process" in output and "Traceback" not in output for output in refused)
    assert weights_sha256(run) == weights_sha256(reference) and losses(run) == losses(reference)
    assert descendants(str(run)) == []


@pytest.mark.slow
def test_a_run_that_was_killed_leaves_nothing_locked(reference_config, reference, tmp_path):
    run = tmp_path / "run"
    first = start(["run", str(reference_config), f"run_dir={run}"])
    while not (run / "lock").exists():
        assert first.poll() is None
    os.kill(first.pid, 9)
    first.communicate()
    code, output = finish(start(["run", str(reference_config), f"run_dir={run}", "--resume", "auto"]))
    assert code == 0, output
    assert weights_sha256(run) == weights_sha256(reference)
