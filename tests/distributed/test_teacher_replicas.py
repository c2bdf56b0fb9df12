"""Teacher replicas of several ranks: the same run as with one rank, whatever happens to any of them."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.distributed.test_launchers import free_port
from tests.distributed.test_run_faults import assert_undisturbed, steps_done, wait_until
from tests.support.models import tiny_model
from tests.support.runs import (
    descendants,
    disaggkd,
    finish,
    losses,
    metrics,
    process_ids,
    run_to_end,
    start,
    weights_sha256,
    write_config,
)

SHARDED = ("teacher.ranks_per_replica=2", "teacher.parallelism=fsdp")
SLOW = ",".join(f"teacher {rank}.forward:sleep:0.3" for rank in ("0.0", "0.1", "1.0", "1.1"))
"""An order to take so long for every answer that there is time to disturb a run."""
TENSOR_BOUND = 3e-5
"""Of ten steps. Sums of two ranks round otherwise than those of one, and by how much depends on the processor."""
TENSOR = ("teacher.ranks_per_replica=2", "teacher.parallelism=tensor")


def rounds_of(run, rank: str) -> tuple[int, int]:
    """Return how many rounds a rank of a replica took part in, and how many of them without a request of its own."""
    log = (run / "logs" / f"teacher_{rank}.log").read_text()
    return tuple(map(int, re.search(r"(\d+) rounds, (\d+) of them idle", log).groups()))


def test_two_sharded_ranks_give_the_same_run_to_the_last_bit(reference_config, reference, tmp_path):
    run = run_to_end(reference_config, tmp_path / "run", *SHARDED)
    assert_undisturbed(run, reference)
    (rounds, idle_0), (same, idle_1) = rounds_of(run, "0.0"), rounds_of(run, "0.1")
    assert rounds == same
    answered = [line["teachers"] for line in metrics(run) if "loss" in line][-1]
    assert sorted(answered) == ["teacher 0.0 #0", "teacher 0.1 #1"] or sorted(answered) == [
        "teacher 0.0 #1", "teacher 0.1 #0",
    ]  # fmt: skip
    assert (rounds - idle_0) + (rounds - idle_1) >= sum(one["requests"] for one in answered.values()) >= 20


def test_two_tensor_parallel_ranks_agree_with_one(reference_config, reference, tmp_path):
    run = run_to_end(reference_config, tmp_path / "run", *TENSOR)
    assert losses(run)[:10] == pytest.approx(losses(reference)[:10], rel=TENSOR_BOUND)
    assert losses(run) == pytest.approx(losses(reference), rel=1e-4)
    assert rounds_of(run, "0.0") == rounds_of(run, "0.1")
    assert descendants(str(run)) == []


@pytest.mark.slow
def test_hidden_states_of_many_families(tmp_path):
    """Sharded: the bits of one rank. Tensor-parallel: to rounding, where transformers has a plan."""
    families = ["llama", "gemma2", "granite", "gpt2", "qwen3_moe", "qwen3_5_text", "cohere", "mixtral", "gpt_oss"]
    for family in families:
        tiny_model(family).save_pretrained(tmp_path / family)
    tiny_model("llama", num_key_value_heads=1).save_pretrained(tmp_path / "one_key_value_head")
    families.append("one_key_value_head")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         "tests/distributed/support/replica_states.py", str(tmp_path), *families],
        capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.startswith(tuple(families))}
    assert sorted(found) == sorted(families)
    for family, (same, share, difference) in found.items():
        assert same == "True", family
        assert float(share) < 0.55, family
        if family in ("gpt2", "gpt_oss", "one_key_value_head"):  # no plan for layers; a head that cannot be shared
            assert difference == "refused"
        else:
            assert float(difference) < 5e-6, family


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", [SHARDED, TENSOR], ids=["fsdp", "tensor"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_takes_its_replica_along_and_all_of_it_comes_back(
    reference_config, reference, tmp_path, layout, rank
):
    run = tmp_path / "run"
    job = start(
        ["run", str(reference_config), f"run_dir={run}", "teacher.replicas=2", *layout],
        DISAGGKD_TESTING="1", DISAGGKD_FAULT=SLOW,
    )  # fmt: skip
    await_service(run)
    victim = process_of("teacher 0", rank, run)
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    wait_until(lambda: process_of("teacher 0", 1 - rank, run, but=victim) is None, "end of the other rank", 15)
    print(f"the other rank ended after {time.monotonic() - killed:.1f} s")
    code, output = finish(job, 240)
    assert code == 0, output
    assert f"teacher 0.{rank} was killed by SIGKILL; starting it again with all 2 ranks of its replica" in output
    assert "Traceback" not in output
    if layout is SHARDED:
        assert_undisturbed(run, reference)
    else:
        assert losses(run)[:10] == pytest.approx(losses(reference)[:10], rel=TENSOR_BOUND)
    assert descendants(str(run)) == []


def await_service(run) -> None:
    """Wait until replica 0 answers and the student trains."""
    log = run / "logs" / "teacher_0.0.log"
    wait_until(lambda: log.exists() and "serves student 0" in log.read_text(), "link of replica 0", 120)
    wait_until(lambda: steps_done(run) >= 2, "second step", 120)


def process_of(replica: str, rank: int, run, but: int | None = None) -> int | None:
    """Return the process id of a rank in its first attempt."""
    for number in process_ids("teacher", str(run)):
        try:
            variables = open(f"/proc/{number}/environ", "rb").read().split(b"\0")
        except OSError:
            continue
        wanted = {f"DISAGGKD_REPLICA={replica.split()[1]}", f"RANK={rank}", "DISAGGKD_ATTEMPT=0"}
        if number != but and {name.encode() for name in wanted} <= set(variables):
            return number
    return None


@pytest.mark.slow
def test_a_stalled_rank_takes_its_replica_along(reference_config, reference, tmp_path):
    run = tmp_path / "run"
    job = start(
        ["run", str(reference_config), f"run_dir={run}", "teacher.replicas=2", *SHARDED, "transport.timeout=4"],
        DISAGGKD_TESTING="1", DISAGGKD_FAULT=SLOW,
    )  # fmt: skip
    await_service(run)
    stalled = process_of("teacher 0", 1, run)
    os.kill(stalled, signal.SIGSTOP)
    try:
        wait_until(lambda: process_of("teacher 0", 0, run) is None, "end of the other rank", 40)
    finally:
        os.kill(stalled, signal.SIGCONT)
    code, output = finish(job, 240)
    assert code == 0, output
    assert_undisturbed(run, reference)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [SHARDED, TENSOR], ids=["fsdp", "tensor"])
def test_sigterm_to_one_rank_ends_the_replica_well(reference_config, reference, tmp_path, layout):
    run = tmp_path / "run"
    job = start(
        ["run", str(reference_config), f"run_dir={run}", "teacher.replicas=2", *layout],
        DISAGGKD_TESTING="1", DISAGGKD_FAULT=SLOW,
    )  # fmt: skip
    await_service(run)
    os.kill(process_of("teacher 0", 1, run), signal.SIGTERM)
    code, output = finish(job, 240)
    assert code == 0, output
    assert "starting it again" not in output
    assert losses(run) == pytest.approx(losses(reference), rel=1e-4)
    assert rounds_of(run, "0.0")[0] == rounds_of(run, "0.1")[0]
    assert "told to stop" in (run / "logs" / "teacher_0.0.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("layout", [SHARDED, TENSOR], ids=["fsdp", "tensor"])
def test_under_torchrun(reference_config, reference, tmp_path, layout):
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "-m", "disaggkd_cli",
         "run", str(reference_config), f"run_dir={run}", *layout],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(run)[:10] == pytest.approx(losses(reference)[:10], rel=TENSOR_BOUND)


@pytest.fixture(scope="module")
def short_config(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("replicas") / "run.yaml", train__steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_replicas_as_a_torchrun_job_of_their_own(short_config, reference, tmp_path, ranks):
    meeting = f"launch.rendezvous=127.0.0.1:{free_port()}"
    teachers = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m",
         "disaggkd_cli", "teacher", str(short_config), meeting, *SHARDED, f"run_dir={tmp_path}/teachers"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    student = start(["student", str(short_config), meeting, *SHARDED, f"run_dir={tmp_path}/student"])
    code, output = finish(student)
    assert code == 0, output
    code, output = finish(teachers)
    assert code == 0, output
    assert losses(tmp_path / "student") == losses(reference)[:3]
    logs = sorted(path.name for path in (tmp_path / "teachers" / "logs").glob("teacher_*.log"))
    assert logs == [f"teacher_{replica}.{rank}.log" for replica in range(ranks // 2) for rank in range(2)]


@pytest.mark.slow
def test_a_replica_as_a_bare_job_of_its_own(short_config, reference, tmp_path):
    meeting = f"launch.rendezvous=127.0.0.1:{free_port()}"
    teacher = start(["teacher", str(short_config), meeting, *SHARDED, f"run_dir={tmp_path}/teacher"])
    student = start(["student", str(short_config), meeting, *SHARDED, f"run_dir={tmp_path}/student"])
    assert finish(student)[0] == 0
    code, output = finish(teacher)
    assert code == 0, output
    assert losses(tmp_path / "student") == losses(reference)[:3]


@pytest.mark.slow
def test_a_bare_replica_stops_at_a_signal_and_names_what_it_cannot_do(short_config, tmp_path):
    meeting = f"launch.rendezvous=127.0.0.1:{free_port()}"
    tiny_model("gpt2").save_pretrained(tmp_path / "gpt2")
    code, output = disaggkd(
        "teacher", str(short_config), meeting, *TENSOR, f"teacher.model={tmp_path}/gpt2", f"run_dir={tmp_path}/refused"
    )
    assert code == 2, output
    assert "teacher.parallelism: transformers has no tensor-parallel plan for the layers of gpt2" in output
    run = tmp_path / "stopped"
    student = start(["student", str(short_config), meeting, f"run_dir={tmp_path}/student", "train.steps=100000",
                     "transport.teacher_wait=20"])  # fmt: skip
    teacher = start(["teacher", str(short_config), meeting, *SHARDED, f"run_dir={run}"])
    log = run / "logs" / "teacher_0.0.log"
    wait_until(lambda: log.exists() and "serves student 0" in log.read_text(), "link", 90)
    teacher.send_signal(signal.SIGTERM)
    code, output = finish(teacher, 60)
    assert code == 0, output
    assert "SIGTERM: stopping" in output
    student.send_signal(signal.SIGTERM)
    assert finish(student)[0] == 75


@pytest.mark.slow
def test_one_replica_of_two_ranks_lost_for_good(reference_config, reference, tmp_path):
    """The student goes on with the other replica, and nothing is lost."""
    run = tmp_path / "run"
    code, output = disaggkd(
        "run", str(reference_config), f"run_dir={run}", "teacher.replicas=2", *SHARDED, "--restarts", "0",
        DISAGGKD_TESTING="1", DISAGGKD_FAULT=f"{SLOW},teacher 0.1.payload:kill@1", timeout=240,
    )  # fmt: skip
    assert code == 0, output
    assert "going on without it" in output
    assert weights_sha256(run) == weights_sha256(reference)
