"""Machines as they are: a run there ends in the same weights, or stops with the cause on its last line."""

import os
import shutil
import subprocess
import sys

import pytest

from disaggkd_cli.training.run_directory import hold
from tests.support.runs import TINY_TEACHER, descendants, finish, start, status, weights_sha256, write_config

pytestmark = pytest.mark.slow

LIMITED = {
    "64 descriptors": "ulimit -n 64",
    "3 GB of address space": "ulimit -v 3000000",
    "a shared memory of 4 KiB": "mount -t tmpfs -o size=4k tmpfs /dev/shm",
    "a host name that nobody resolves": "hostname no-such-host",
    "no network but loopback": "ip link set lo up",
    "loopback of IPv6 only": "ip link set lo up; ip addr del 127.0.0.1/8 dev lo",
}


def on_a_machine_with(limit, config, run, *arguments, timeout=170):
    """Run a job under a shell command that changes its machine, in name spaces of its own; return (code, output)."""
    job = " ".join([sys.executable, "-m", "disaggkd_cli", "run", str(config), f"run_dir={run}", *arguments])
    apart = ["unshare", "--mount", "--uts", *(["--net"] if "lo " in limit else [])]
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("making name spaces needs root")
    done = subprocess.run(
        [*apart, "bash", "-c", f"{limit} && exec {job}"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(autouse=True)
def shared_memory():
    """What a test's runs leave in shared memory."""
    before = set(os.listdir("/dev/shm"))
    yield
    assert set(os.listdir("/dev/shm")) <= before


def nothing_remains(run):
    """No process, no half-written file, no lock."""
    assert descendants(str(run)) == []
    hold(run, "a test").close()
    assert not [path for path in run.rglob("*") if path.name.startswith((".writing", ".secret", ".tmp"))]


@pytest.mark.parametrize("limit", LIMITED.values(), ids=LIMITED)
def test_it_ends_in_the_same_weights(reference_config, reference, tmp_path, limit):
    code, output = on_a_machine_with(limit, reference_config, tmp_path / "run")
    assert code == 0, output
    assert weights_sha256(tmp_path / "run") == weights_sha256(reference)
    nothing_remains(tmp_path / "run")


def test_too_little_memory_is_said_last(reference_config, tmp_path):
    code, output = on_a_machine_with("ulimit -v 1000000", reference_config, tmp_path / "run", "--restarts", "0")
    assert code == 1
    assert "memory" in output.strip().splitlines()[-1], output
    nothing_remains(tmp_path / "run")


def test_without_any_loopback_the_cause_is_said_last(reference_config, tmp_path):
    code, output = on_a_machine_with("ip link set lo down", reference_config, tmp_path / "run", "--restarts", "0")
    assert code in (1, 2)
    assert "127.0.0.1" in output.strip().splitlines()[-1], output


def test_spaces_and_letters_of_any_script_in_every_path(reference, tmp_path):
    place = tmp_path / "мой диск ✓ [x]"
    teacher = place / "der Lehrer"
    shutil.copytree(TINY_TEACHER, teacher)
    config = write_config(place / "läuft so.yaml", teacher__model=str(teacher))
    run = place / "run = 1"
    code, output = finish(start(["run", str(config), f"run_dir={run}", f"data.cache={place}/cache"]))
    assert code == 0, output
    assert weights_sha256(run) == weights_sha256(reference)
    nothing_remains(run)


def test_a_directory_that_cannot_be_written_is_refused_at_once(reference_config, tmp_path):
    code, output = finish(start(["run", str(reference_config), "run_dir=/proc/run"]))
    assert (code, len(output.strip().splitlines())) == (2, 1)
    assert "run_dir: /proc/run cannot be written to" in output


@pytest.mark.parametrize("size", ["3m", "9m", "10m"])
def test_a_disk_that_fills_up_anywhere(reference_config, reference, tmp_path, size):
    """In logs and metrics, in the first checkpoint, in the export: it goes on from there once there is room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], capture_output=True
    ).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        code, output = finish(start(["run", str(reference_config), f"run_dir={disk}/run", "--restarts", "0",
                                     "train.keep_checkpoints=1"]))  # fmt: skip
        assert code in (0, 1, 75), output
        if code:
            assert "No space left" in output.strip().splitlines()[-1], output
        assert "Traceback" not in output
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        code, output = finish(start(["run", str(reference_config), f"run_dir={disk}/run", "--resume", "auto",
                                     "train.keep_checkpoints=1"]))  # fmt: skip
        assert code == 0, output
        assert status(disk / "run")["state"] == "finished"
        assert weights_sha256(disk / "run") == weights_sha256(reference)
        nothing_remains(disk / "run")
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_disk_that_hangs_ends_the_run_in_time(reference_config, reference, tmp_path):
    run = tmp_path / "run"
    job = start(
        ["run", str(reference_config), f"run_dir={run}", "train.save_timeout=2", "--restarts", "0"],
        DISAGGKD_TESTING="1", DISAGGKD_FAULT="student 0.ckpt_fsync:sleep:3600@2",
    )  # fmt: skip
    code, output = finish(job, 60)
    assert code == 1
    assert "has made no progress for 2 s (train.save_timeout)" in output.strip().splitlines()[-1]
    code, output = finish(start(["run", str(reference_config), f"run_dir={run}", "--resume", "auto"]))
    assert code == 0 and "resuming after step 7" in output, output
    assert weights_sha256(run) == weights_sha256(reference)
    nothing_remains(run)
