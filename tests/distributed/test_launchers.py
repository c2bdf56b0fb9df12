"""The same run under torchrun, under SLURM's variables, and as two jobs."""

import random
import socket
import subprocess
import sys

import pytest

from tests.support.runs import disaggkd, finish, losses, start, status, write_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("launchers")


@pytest.fixture(scope="module")
def config(folder):
    return write_config(folder / "run.yaml", train__steps=3)


def free_port() -> int:
    """Return a free port below those that the system hands out by itself, so that nobody takes it meanwhile."""
    while True:
        port = random.randrange(15000, 30000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


def test_torchrun(config, folder, reference):
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "disaggkd_cli",
         "run", str(config), f"run_dir={folder}/torchrun"],
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(folder / "torchrun") == losses(reference)[:3]


def test_slurm(config, folder, reference):
    variables = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "2", "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": str(free_port())}  # fmt: skip
    ranks = [
        start(["run", str(config), f"run_dir={folder}/slurm"], SLURM_PROCID=rank, SLURM_LOCALID=rank, **variables)
        for rank in "01"
    ]
    for rank in ranks:
        code, output = finish(rank)
        assert code == 0, output
    assert losses(folder / "slurm") == losses(reference)[:3]


@pytest.mark.parametrize("first", ["teacher", "student"])
def test_two_jobs_in_either_order(config, folder, reference, first):
    meeting = f"launch.rendezvous=127.0.0.1:{free_port()}"
    run_dir = folder / f"{first}_first"
    commands = {
        "teacher": ["teacher", str(config), meeting],
        "student": ["student", str(config), meeting, f"run_dir={run_dir}"],
    }
    second = "student" if first == "teacher" else "teacher"
    jobs = [start(commands[first])]
    assert_alive_for(jobs[0], 4)
    jobs.append(start(commands[second]))
    ended = [finish(job) for job in jobs]
    assert [code for code, _ in ended] == [0, 0], "\n".join(output for _, output in ended)
    assert losses(run_dir) == losses(reference)[:3]


def assert_alive_for(process, seconds):
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(seconds)


def test_too_few_ranks(config, folder):
    code, output = disaggkd(
        "run", str(config), f"run_dir={folder}/few", RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1"
    )
    assert code == 2
    assert "torchrun started 1 ranks, but the config needs 2" in output


def test_a_teacher_that_never_comes(config, folder):
    run_dir = folder / "alone"
    code, output = disaggkd(
        "student", str(config), f"launch.rendezvous=127.0.0.1:{free_port()}", f"run_dir={run_dir}",
        "transport.teacher_wait=3",
    )  # fmt: skip
    assert code == 75, output
    assert "no teacher for 3 s (transport.teacher_wait=3); none ever announced itself" in output
    assert status(run_dir)["state"] == "stopped"
    assert status(run_dir)["exit_code"] == 75


def test_a_student_that_never_comes(config):
    code, output = disaggkd(
        "teacher", str(config), f"launch.rendezvous=127.0.0.1:{free_port()}", "transport.teacher_wait=3"
    )
    assert code == 1, output
    assert "nobody serves the rendezvous at 127.0.0.1:" in output


def test_a_port_that_is_taken(config, folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, output = disaggkd("run", str(config), f"launch.rendezvous=127.0.0.1:{port}", f"run_dir={folder}/port")
    assert code == 2
    assert f"launch.rendezvous: cannot listen on 127.0.0.1:{port}" in output
    assert "Traceback" not in output
