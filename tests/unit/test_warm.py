"""A process forked from the warm server is, for its parent, the one that `subprocess.Popen` would have started."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from disaggkd_cli.gpus import prepare_allocator
from tests.support import warm
from tests.support.runs import descendants, process_ids
from tests.support.warm import WarmPopen

PROBE = [sys.executable, "-m", "tests.support.warm_probe"]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("popen", [WarmPopen, subprocess.Popen])
def test_standard_files_arguments_directory_and_variables(popen, tmp_path):
    # Started afresh elsewhere than in the root, Python has to be told where the probe is; a fork has it imported.
    afresh = {"PYTHONPATH": str(ROOT)} if popen is subprocess.Popen else {}
    with popen(
        [*PROBE, "describe", "an argument", ""], cwd=tmp_path, env={**os.environ, **afresh, "DISAGGKD_ROLE": "x"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        output, errors = process.communicate("what is asked\n", timeout=60)
    found = json.loads(output)
    assert (process.returncode, errors) == (3, "an error\n")
    assert found.pop("pid") == process.pid
    assert found == {
        "arguments": ["describe", "an argument", ""],
        "cwd": str(tmp_path),
        "role": "x",
        "parent": os.getpid(),
        "leads": False,
        "threads": 1,
        "read": "what is asked\n",
        "open": [0, 1, 2],
        "main": "tests.support.warm_probe",
    }


@pytest.mark.parametrize("popen", [WarmPopen, subprocess.Popen])
def test_an_exception_ends_with_1_and_its_traceback(popen):
    with popen([*PROBE, "raise"], stderr=subprocess.PIPE, text=True) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and errors.endswith("ValueError: a traceback\n")


def test_a_passed_descriptor_keeps_its_number():
    ours, theirs = os.pipe()
    with WarmPopen([*PROBE, "write", str(theirs)], pass_fds=(theirs,)) as process:
        os.close(theirs)
        assert os.read(ours, 100) == b"through a passed descriptor"
        assert os.read(ours, 100) == b"", "nobody else holds it"
        assert process.wait(60) == 0
    os.close(ours)


def silent_but_for_its_output(*arguments):
    return WarmPopen([*PROBE, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@pytest.mark.parametrize("number, code", [(signal.SIGUSR1, 11), (signal.SIGKILL, -9), (signal.SIGINT, -2)])
def test_signals(number, code):
    with WarmPopen(
        [*PROBE, "wait", str(int(number))], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout.readline() == "waiting\n"
        assert descendants(f"{sys.executable} -m tests.support.warm_probe wait {int(number)} ") == [process.pid]
        process.send_signal(number)
        assert process.wait(60) == code
    assert descendants(f"warm_probe wait {int(number)} ") == []


def test_what_it_starts_is_forked_too_and_dies_with_it(tmp_path):
    with WarmPopen(
        [*PROBE, "run", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        said = sorted(process.stdout.readline() for _ in range(2))  # whoever is first
        child, kind = said[0].split()
        assert (kind, said[1]) == ("WarmPopen", "waiting\n")
        assert descendants(str(tmp_path)) == sorted([process.pid, int(child)])
        assert process_ids("student", str(tmp_path)) == [int(child)]
        assert _parent(int(child)) == process.pid
        process.kill()
    deadline = time.monotonic() + 60
    while descendants(str(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert descendants(str(tmp_path)) == []


def test_other_interpreters_and_variables_that_imports_read_are_started_afresh():
    describe = [*PROBE, "describe"]
    silent = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    with WarmPopen(describe, env={**os.environ, "PYTHONHASHSEED": "7"}, **silent) as process:
        assert process.wait(60) == 3
    with WarmPopen(["true"]) as process:
        assert process.wait(60) == 0


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_the_ranks_of_a_supervisor_can_be_forked():
    """What a supervisor sets for its ranks changes no import; else each rank would import everything once more."""
    environment = dict(os.environ)
    server = warm.Server(None, dict(environment))
    prepare_allocator(environment)
    assert warm._same_imports(environment, server)
    assert not warm._same_imports({**environment, "PYTORCH_ENABLE_MPS_FALLBACK": "1"}, server)
