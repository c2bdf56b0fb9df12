"""Who reaches the rendezvous and does not know the run's secret changes no bit of the weights."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.runs import descendants, finish, process_ids, start, status, weights_sha256
from tests.support.warm import WarmPopen

sys.path.insert(0, str(Path(__file__).parent / "support"))
from transport_peers import listening_endpoints_of  # noqa: E402

INTRUDER = Path(__file__).parent / "support" / "intruder.py"
SLOW_STEPS = {"DISAGGKD_TESTING": "1", "DISAGGKD_FAULT": "student 0.before_commit:sleep:0.5"}


def intrude(config, run, what, *overrides, seconds=60):
    """Start a run and, once it listens, an intruder; return the run's exit code and output, and the intruder's."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    job = start(["run", str(config), f"run_dir={run}", f"launch.rendezvous={endpoint}", *overrides], **SLOW_STEPS)
    command = [sys.executable, str(INTRUDER), endpoint, what, str(seconds)]
    intruder = WarmPopen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        code, output = finish(job, 170)
    finally:
        intruder.terminate()
        said, _ = intruder.communicate(timeout=30)
        job.kill()
    assert descendants(str(run)) == []
    return code, output, said


@pytest.mark.slow
def test_without_a_secret_an_impersonator_changes_the_weights(reference_config, reference, tmp_path):
    """What the secret is for; were this to fail, the test below would prove nothing."""
    run = tmp_path / "run"
    code, output, said = intrude(reference_config, run, "impersonate", "launch.secret=none")
    assert code == 0, output
    assert "teacher 9 joined" in (run / "logs" / "student_0.log").read_text(), said
    assert weights_sha256(run) != weights_sha256(reference)


def test_an_impersonator_is_skipped_and_named(reference_config, reference, tmp_path):
    run = tmp_path / "run"
    code, output, said = intrude(reference_config, run, "impersonate")
    assert code == 0, output
    log = (run / "logs" / "student_0.log").read_text()
    assert "is skipped: it is not signed with this run's secret" in log, said + log
    assert "teacher 9" not in log
    assert weights_sha256(run) == weights_sha256(reference)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["garbage", "delete"])
def test_who_spoils_the_rendezvous_can_at_most_stop_the_run(reference_config, reference, tmp_path, what):
    run = tmp_path / "run"
    code, output, _ = intrude(reference_config, run, what, "transport.teacher_wait=20", seconds=30)
    assert code in (0, 75), output
    if code == 75:
        assert status(run)["resumable"] or status(run)["last_step"] == 0
        code, output = finish(start(["run", str(reference_config), f"run_dir={run}", "--resume", "auto"]))
        assert code == 0, output
    assert weights_sha256(run) == weights_sha256(reference)


@pytest.mark.slow
def test_connections_that_say_nothing_take_no_descriptors(reference_config, reference, tmp_path):
    """At every port of the student, links and groups too: the rendezvous alone takes them, and gives them back."""
    run = tmp_path / "run"
    job = start(["run", str(reference_config), f"run_dir={run}"], **SLOW_STEPS)
    taken = []
    try:
        while not (run / "metrics.jsonl").exists() or '"loss"' not in (run / "metrics.jsonl").read_text():
            assert job.poll() is None
            time.sleep(0.1)
        (student,) = process_ids("student", str(run))
        before = descriptors(student)
        for endpoint in sorted(listening_endpoints_of(student)):
            for _ in range(30):
                with contextlib.suppress(OSError):
                    taken.append(socket.create_connection(endpoint, timeout=0.05))
        time.sleep(1)
        during = descriptors(student)
        for connection in taken:
            connection.close()
        deadline = time.monotonic() + 5
        while descriptors(student) > before + 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        after = descriptors(student)
        code, output = finish(job)
        assert code == 0, output
    finally:
        job.kill()
    assert during <= before + 30 + 3 and after <= before + 3, (before, during, after)
    assert weights_sha256(run) == weights_sha256(reference)


def descriptors(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))
