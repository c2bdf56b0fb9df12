"""Real deaths of real processes: whatever dies, the run ends in the same weights as the undisturbed one."""

import os
import signal
import subprocess
import time

import pytest

from tests.support.runs import (
    descendants,
    disaggkd,
    finish,
    losses,
    metrics,
    process_ids,
    start,
    status,
    weights_sha256,
)


def assert_undisturbed(run, reference):
    assert weights_sha256(run) == weights_sha256(reference)
    assert losses(run) == losses(reference)
    lines = [line["step"] for line in metrics(run) if "loss" in line]
    assert lines == list(range(1, 21))
    assert descendants(str(run)) == []


def run_with_faults(config, run, faults: str, *arguments: str, restarts: int = 30) -> str:
    code, output = disaggkd(
        "run", str(config), f"run_dir={run}", "--restarts", str(restarts), *arguments,
        DISAGGKD_TESTING="1", DISAGGKD_FAULT=faults, timeout=280,
    )  # fmt: skip
    assert code == 0, output
    return output


def test_a_teacher_that_dies_in_the_middle_of_a_payload_again_and_again(reference_config, reference, tmp_path):
    output = run_with_faults(reference_config, tmp_path / "run", "teacher 0.payload:kill@9")
    assert output.count("was killed by SIGKILL; starting it again") >= 2
    assert output.count("joined") >= 3
    assert_undisturbed(tmp_path / "run", reference)


def test_a_student_that_dies_between_a_step_and_its_checkpoint(reference_config, reference, tmp_path):
    # Steps slow enough that the save of step 14, which goes on beside them, is done when step 15 dies.
    faults = "student 0.before_commit:sleep:0.1,student 0.after_commit:kill@8"
    output = run_with_faults(reference_config, tmp_path / "run", faults)
    assert output.count("starting the student again from its newest valid checkpoint") >= 2
    assert "resuming after step 7 from" in output
    assert_undisturbed(tmp_path / "run", reference)


def test_a_student_that_dies_inside_a_save(reference_config, reference, tmp_path):
    output = run_with_faults(reference_config, tmp_path / "run", "student 0.ckpt_rename:kill@2")
    assert "resuming after step 7 from" in output
    assert_undisturbed(tmp_path / "run", reference)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("point", ["before_commit", "after_commit", "ckpt_open", "ckpt_fsync"])
def test_a_student_that_dies_at_every_step(reference_config, reference, tmp_path, point):
    code, output = disaggkd(
        "run", str(reference_config), f"run_dir={tmp_path}/run", "--restarts", "40", "train.save_every=1",
        DISAGGKD_TESTING="1", DISAGGKD_FAULT=f"student 0.{point}:kill@3", timeout=850,
    )  # fmt: skip
    assert code == 0, output
    assert output.count("starting the student again") >= 9
    assert_undisturbed(tmp_path / "run", reference)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("reply", range(2, 22))
def test_a_teacher_that_dies_at_each_reply(reference_config, reference, tmp_path, reply):
    run_with_faults(reference_config, tmp_path / "run", f"teacher 0.payload:kill@{reply}")
    assert_undisturbed(tmp_path / "run", reference)


@pytest.mark.slow
def test_two_student_ranks_one_of_which_dies(reference_config, reference, tmp_path):
    arguments = ("student.ranks=2", "train.micro_batch_sequences=2")
    output = run_with_faults(reference_config, tmp_path / "run", "student 1.after_commit:kill@9", *arguments)
    assert "student 1 was killed by SIGKILL" in output
    assert losses(tmp_path / "run") == pytest.approx(losses(reference), rel=1e-5)
    assert descendants(str(tmp_path / "run")) == []


def test_a_bad_payload_is_asked_for_again(reference_config, reference, tmp_path):
    # Slow enough that the second teacher has joined long before the first one could answer everything.
    slow = "teacher 0.forward:sleep:0.3,teacher 1.forward:sleep:0.3"
    faults = f"teacher 0.payload:flip@2,teacher 1.forward:nan@7,{slow}"
    output = run_with_faults(reference_config, tmp_path / "run", faults, "teacher.replicas=2")
    assert output.count("bad reply, asked for again") == 2
    assert_undisturbed(tmp_path / "run", reference)


def wait_until(condition, what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.05)


def steps_done(run) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count('"loss"') if path.exists() else 0


def start_slow_run(config, run, *arguments: str) -> subprocess.Popen:
    """Start a run whose teacher takes 0.3 s for each answer, so that there is time to disturb it."""
    return start(
        ["run", str(config), f"run_dir={run}", *arguments], DISAGGKD_TESTING="1",
        DISAGGKD_FAULT="teacher 0.forward:sleep:0.3,teacher 1.forward:sleep:0.3",
    )  # fmt: skip


def test_sigterm_saves_and_the_run_goes_on_later(reference_config, reference, tmp_path):
    run = tmp_path / "run"
    job = start_slow_run(reference_config, run)
    wait_until(lambda: steps_done(run) >= 3, "third step")
    job.send_signal(signal.SIGTERM)
    code, output = finish(job)
    assert code == 75, output
    assert "stopped by SIGTERM; saved after step" in output.splitlines()[-1]
    assert status(run)["resumable"]
    assert descendants(str(run)) == []
    code, output = disaggkd("run", str(reference_config), f"run_dir={run}", "--resume", "auto")
    assert code == 0, output
    assert_undisturbed(run, reference)


def test_a_second_signal_quits_at_once(reference_config, tmp_path):
    run = tmp_path / "run"
    job = start_slow_run(reference_config, run)
    wait_until(lambda: steps_done(run) >= 1, "first step")
    job.send_signal(signal.SIGTERM)
    job.send_signal(signal.SIGINT)
    code, output = finish(job, timeout=20)
    assert code in (128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGINT, -signal.SIGTERM), output
    wait_until(lambda: descendants(str(run)) == [], "end of all ranks", 10)


def test_the_supervisor_takes_its_ranks_with_it(reference_config, tmp_path):
    run = tmp_path / "run"
    job = start_slow_run(reference_config, run)
    wait_until(lambda: steps_done(run) >= 1, "first step")
    job.kill()
    job.communicate()
    wait_until(lambda: descendants(str(run)) == [], "end of all ranks", 10)


def test_a_stalled_teacher_is_given_up_and_its_late_answers_are_not_used(reference_config, reference, tmp_path):
    run = tmp_path / "run"
    job = start_slow_run(reference_config, run, "teacher.replicas=2", "transport.timeout=4")
    wait_until(lambda: steps_done(run) >= 2, "second step")
    (stalled, _) = process_ids("teacher", str(run))
    os.kill(stalled, signal.SIGSTOP)
    time.sleep(6)
    os.kill(stalled, signal.SIGCONT)
    code, output = finish(job)
    assert code == 0, output
    assert_undisturbed(run, reference)


def test_no_teacher_left(reference_config, reference, tmp_path):
    run = tmp_path / "run"
    job = start_slow_run(reference_config, run, "--restarts", "0", "transport.teacher_wait=3")
    wait_until(lambda: steps_done(run) >= 2, "second step")
    (teacher,) = process_ids("teacher", str(run))
    os.kill(teacher, signal.SIGKILL)
    code, output = finish(job)
    assert code == 75, output
    assert "no teacher for 3 s (transport.teacher_wait=3)" in output
    code, output = disaggkd("run", str(reference_config), f"run_dir={run}", "--resume", "auto")
    assert code == 0, output
    assert_undisturbed(run, reference)


@pytest.mark.slow
def test_a_full_disk(reference_config, reference, tmp_path):
    run = tmp_path / "run"
    fault = {"DISAGGKD_TESTING": "1", "DISAGGKD_FAULT": "student 0.ckpt_fsync:error@2"}
    code, output = disaggkd("run", str(reference_config), f"run_dir={run}", "--restarts", "0", **fault)
    assert code == 1
    assert "checkpoint of step 14 could not be written to" in output
    assert "No space left on device" in output
    assert [path.name for path in (run / "checkpoints").glob("step_*")] == ["step_00000007"]
    code, output = disaggkd("run", str(reference_config), f"run_dir={run}", "--resume", "auto")
    assert code == 0, output
    assert_undisturbed(run, reference)
    code, output = disaggkd(
        "run", str(reference_config), f"run_dir={tmp_path}/warned", "train.on_save_error=warn", **fault
    )
    assert code == 0, output
    assert "going on, since train.on_save_error=warn" in output
    assert_undisturbed(tmp_path / "warned", reference)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 16 MiB, room for one checkpoint of 8.5 MiB and not for two."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_disk_that_is_really_full(reference_config, reference, small_disk):
    run = small_disk / "run"
    code, output = disaggkd("run", str(reference_config), f"run_dir={run}", "--restarts", "0")
    assert code == 1
    assert f"checkpoint of step 14 could not be written to {run}/checkpoints" in output.splitlines()[-2]
    assert [path.name for path in (run / "checkpoints").glob("step_*")] == ["step_00000007"]
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    code, output = disaggkd("run", str(reference_config), f"run_dir={run}", "--resume", "auto")
    assert code == 0, output
    assert "resuming after step 7" in output
    assert_undisturbed(run, reference)


def test_a_damaged_checkpoint_is_passed_over_with_a_log_line(reference_config, reference, tmp_path):
    run = tmp_path / "run"
    code, output = disaggkd("run", str(reference_config), f"run_dir={run}", "train.stop_at=15")
    assert code == 75, output
    (weights,) = (run / "checkpoints" / "step_00000015").glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-9] ^= 1
    weights.write_bytes(bytes(data))
    code, output = disaggkd("run", str(reference_config), f"run_dir={run}", "--resume", "auto")
    assert code == 0, output
    assert "checkpoint refused" in output
    assert "contents differ" in output
    assert "resuming after step 14" in output
    assert_undisturbed(run, reference)


@pytest.mark.slow
def test_changed_texts_are_not_resumed(reference_config, tmp_path):
    run = tmp_path / "run"
    code, output = disaggkd("run", str(reference_config), f"run_dir={run}", "mode=colocated", "train.stop_at=1")
    assert code == 75, output
    code, output = disaggkd(
        "run", str(reference_config), f"run_dir={run}", "mode=colocated", "--resume", "auto", "data.sequence_length=40"
    )
    assert code == 2
    assert "cannot go on from it, since this changed: data (was" in output
