"""Processes that are killed, stopped, damaged or lie: what is delivered is always exactly the undisturbed stream."""

import random
import signal
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))
from transport_peers import Peers, expected_digest  # noqa: E402

pytestmark = pytest.mark.timeout(120)
MANY_SEEDS = range(20)
SLOW = pytest.mark.slow


@pytest.fixture
def peers(tmp_path):
    made = Peers(tmp_path)
    yield made
    made.end()


def assert_undisturbed(record, start, stop, **shape):
    """The student consumed exactly this range, in order, with the values of an undisturbed run."""
    assert record["error"] is None, record["error"]
    assert record["ids"] == list(range(start, stop))
    assert record["sha256"] == expected_digest(start, stop, **shape)


def lost(record):
    return [line for line in record["events"] if line.startswith("lost")]


def test_two_students_and_two_teachers_end_cleanly_and_listen_on_loopback_only(peers):
    teachers = [peers.teacher(number, fresh=number == 0) for number in range(2)]
    students = [peers.student(rank, stop=60, pause=0.02, fresh=rank == 0) for rank in range(2)]
    for student in students:
        student.await_line("step 5")
    assert peers.listening_addresses() == {"127.0.0.1"}
    for student in students:
        record = student.result()
        assert_undisturbed(record, 0, 60)
        assert not lost(record)
    assert [teacher.result()["reason"] for teacher in teachers] == ["finished"] * 2


def kill_at(peers, seed):
    """SIGKILL a teacher a random moment after a random step; start it again; the other one carries on meanwhile."""
    draw = random.Random(seed)
    victim = peers.teacher(0, pause=0.01)
    peers.teacher(1, pause=0.01)
    student = peers.student(0, stop=80, seed=seed)
    step = draw.randrange(0, 60)
    victim.await_line("serves student 0")
    student.await_line(f"step {step}\n")
    time.sleep(draw.random() * 0.02)
    victim.signal(signal.SIGKILL)
    peers.teacher(0, pause=0.01)
    record = student.result()
    assert_undisturbed(record, 0, 80, seed=seed)
    return record


def test_a_killed_teacher_loses_nothing(peers):
    kill_at(peers, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", MANY_SEEDS)
def test_a_killed_teacher_loses_nothing_at_many_points(peers, seed):
    kill_at(peers, 100 + seed)


BIG = {"width": 4096, "sequence": 256, "rows": "all"}


def test_a_teacher_that_dies_while_a_payload_travels(peers):
    """4 MiB payloads of which the fourth is cut off midway, after its READY."""
    dying = peers.teacher(0, fault="teacher 0.payload:kill@4", timeout=2, width=BIG["width"])
    student = peers.student(0, stop=16, timeout=2, **BIG)
    dying.await_line("serves student 0")
    peers.teacher(1, timeout=2, pause=0.02, width=BIG["width"])
    record = student.result()
    assert_undisturbed(record, 0, 16, **BIG)
    assert len(lost(record)) == 1 and "teacher 0" in lost(record)[0]


def test_the_late_bytes_of_a_payload_stopped_midway_reach_no_slot(peers):
    """SIGSTOP within a 4 MiB payload, SIGCONT once its request went to another teacher and its slot is in use again.

    The student compares each lease when it takes it and once more before it gives it back.
    """
    stopped = peers.teacher(0, fault="teacher 0.payload:stop@4", timeout=2, width=BIG["width"])
    student = peers.student(0, stop=28, timeout=2, pause=0.1, depth=2, **BIG)
    stopped.await_line("serves student 0")
    peers.teacher(1, timeout=2, pause=0.02, width=BIG["width"])
    student.await_line("lost teacher 0")
    stopped.signal(signal.SIGCONT)
    student.await_line("teacher 0 joined again")
    record = student.result()
    assert_undisturbed(record, 0, 28, **BIG)
    assert len(lost(record)) == 1 and "teacher 0" in lost(record)[0]


def test_a_stop_shorter_than_the_timeout_heals_without_losing_the_link(peers):
    teacher = peers.teacher(0, timeout=20, pause=0.01)
    student = peers.student(0, stop=60, timeout=20)
    student.await_line("step 20\n")
    teacher.signal(signal.SIGSTOP)
    time.sleep(3)
    teacher.signal(signal.SIGCONT)
    record = student.result()
    assert_undisturbed(record, 0, 60)
    assert not lost(record)


@SLOW  # stopped within a payload, which is the harder case, stands above
def test_a_stalled_teacher_is_replaced_and_comes_back_without_its_late_bytes(peers):
    stalled = peers.teacher(0, timeout=2, pause=0.01)
    healthy = peers.teacher(1, timeout=2, pause=0.03)
    student = peers.student(0, stop=150, timeout=2, pause=0.02)
    stalled.await_line("serves student 0")
    student.await_line("step 20\n")
    stalled.signal(signal.SIGSTOP)
    student.await_line("lost teacher 0")
    stalled.signal(signal.SIGCONT)
    student.await_line("teacher 0 joined again")
    record = student.result()
    assert_undisturbed(record, 0, 150)
    assert not any("teacher 1" in line for line in lost(record)), "a stalled teacher disturbed a healthy link"
    assert {peer.result()["reason"] for peer in (stalled, healthy)} == {"finished"}


def test_when_all_teachers_die_a_new_one_within_the_wait_goes_on(peers):
    teachers = [peers.teacher(number, pause=0.01) for number in range(2)]
    student = peers.student(0, stop=60, pause=0.01)
    student.await_line("step 20\n")
    for teacher in teachers:
        teacher.signal(signal.SIGKILL)
    student.await_line("; 0 linked")
    peers.teacher(2)
    assert_undisturbed(student.result(), 0, 60)


def test_when_all_teachers_stay_dead_the_student_gives_up_after_its_wait_with_what_it_has(peers):
    teacher = peers.teacher(0, pause=0.01)
    student = peers.student(0, stop=1000, teacher_wait=2)
    student.await_line("step 20\n")
    teacher.signal(signal.SIGKILL)
    record = student.result()
    assert record["error_kind"] == "TeachersLost"
    assert "transport.teacher_wait=2" in record["error"] and "teacher 0 (gone)" in record["error"]
    taken = len(record["ids"])
    assert record["ids"] == list(range(taken)) and record["sha256"] == expected_digest(0, taken)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("payload:flip@5", "checksum is wrong"),
        ("forward:nan@5", "not finite"),
        ("forward:raise@5", "a fault ordered by the test"),
    ],
)
def test_one_bad_reply_is_asked_for_again(peers, fault, says):
    peers.teacher(0, fault=f"teacher 0.{fault}")
    record = peers.student(0, stop=40).result()
    assert_undisturbed(record, 0, 40)
    assert any(says in line for line in record["events"]), record["events"]
    assert not lost(record)


def test_a_teacher_that_keeps_sending_damaged_payloads_is_quarantined(peers):
    peers.teacher(0, fault="teacher 0.payload:flip@4,teacher 0.payload:flip@6", pause=0.01)
    peers.teacher(1, pause=0.02)
    record = peers.student(0, stop=60).result()
    assert_undisturbed(record, 0, 60)
    (state,) = [state for name, state in record["teachers"].items() if name.startswith("teacher 0")]
    assert state["strikes"] == 2 and "quarantined after 2 bad replies" in state["blocked"]


@pytest.mark.parametrize("fault", ["rows", "hash", *(pytest.param(name, marks=SLOW) for name in ("width", "size"))])
def test_a_reply_that_announces_anything_else_than_asked_ends_that_link_only(peers, fault):
    """A wrong shape or token hash is a typed error before the payload is received, never an abort of the process."""
    peers.teacher(0, fault=f"teacher 0.ready:{fault}@3", pause=0.01)
    peers.teacher(1, pause=0.02)
    record = peers.student(0, stop=40).result()
    assert_undisturbed(record, 0, 40)
    (line,) = lost(record)
    assert "teacher 0" in line and "announces" in line and "the student expects" in line


def test_a_forward_that_hangs_is_given_to_another_teacher(peers):
    """The teacher's threads still say PING, but the forward has been running longer than the timeout."""
    hanging = peers.teacher(0, fault="teacher 0.forward:hang@3", timeout=2)
    peers.teacher(1, timeout=2, pause=0.02)
    student = peers.student(0, stop=60, timeout=2)
    student.await_line("lost teacher 0")
    hanging.signal(signal.SIGKILL)  # or else the student's goodbye would wait its full bound for it
    record = student.result()
    assert_undisturbed(record, 0, 60)
    assert "one forward has been running" in lost(record)[0]


def test_a_killed_student_resumes_with_the_same_teachers(peers):
    teachers = [peers.teacher(number, pause=0.01) for number in range(2)]
    first = peers.student(0, stop=100)
    first.await_line("step 30\n")
    first.signal(signal.SIGKILL)
    first.await_end()
    record = peers.student(0, start=20, stop=60).result()
    assert_undisturbed(record, 20, 60)
    assert [teacher.result()["reason"] for teacher in teachers] == ["finished"] * 2


def test_teachers_outlive_a_rendezvous_that_vanishes_with_the_student(peers, unused_endpoint):
    """Student rank 0 hosts the store, dies by SIGKILL, and a new attempt serves the same address."""
    teacher = peers.teacher(0, endpoint=unused_endpoint, pause=0.01)
    first = peers.student(0, endpoint=unused_endpoint, host="yes", stop=100)
    first.await_line("step 30\n")
    first.signal(signal.SIGKILL)
    first.await_end()
    record = peers.student(0, endpoint=unused_endpoint, host="yes", start=20, stop=60).result()
    assert_undisturbed(record, 20, 60)
    assert teacher.result()["reason"] == "finished"
    assert "the rendezvous is gone" in teacher.errors()


def test_a_student_that_never_returns_ends_its_teachers_after_their_wait(peers):
    teacher = peers.teacher(0, student_wait=2)
    student = peers.student(0, stop=1000, pause=0.01)
    student.await_line("step 5\n")
    student.signal(signal.SIGKILL)
    assert teacher.result(20)["reason"] == "student vanished"
    assert "lost student 0" in teacher.errors()


def test_a_student_stopped_for_longer_than_the_timeout_goes_on(peers):
    peers.teacher(0, timeout=2, pause=0.01)
    student = peers.student(0, stop=60, timeout=2)
    student.await_line("step 20\n")
    student.signal(signal.SIGSTOP)
    time.sleep(4)
    student.signal(signal.SIGCONT)
    assert_undisturbed(student.result(), 0, 60)


def test_a_teacher_told_to_stop_leaves_and_its_work_goes_to_the_other(peers):
    leaving, staying = peers.teacher(0, pause=0.01), peers.teacher(1, pause=0.01)
    student = peers.student(0, stop=100)
    leaving.await_line("serves student 0")
    student.await_line("step 20\n")
    leaving.signal(signal.SIGTERM)
    assert leaving.result()["reason"] == "told to stop"
    assert_undisturbed(student.result(), 0, 100)
    assert staying.result()["reason"] == "finished"


def test_a_student_that_finishes_while_a_teacher_is_stopped_still_exits_cleanly(peers):
    """Its goodbye is bounded, and a thread that still waits for the stopped peer does not spoil the exit."""
    stopped = peers.teacher(0, timeout=30, pause=0.01)
    peers.teacher(1, timeout=30, pause=0.01)
    student = peers.student(0, stop=40, timeout=30, fresh=True, pause=0.05)
    stopped.await_line("serves student 0")
    student.await_line("step 38\n")
    stopped.signal(signal.SIGSTOP)
    record = student.result(60)
    assert record["ids"] == list(range(40))


@pytest.fixture
def unused_endpoint():
    from disaggkd_cli.transport import listen

    with listen("127.0.0.1", 0) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_soak_with_a_fault_every_few_seconds_loses_and_repeats_nothing(seed):
    from transport_chaos import is_clean, run_soak

    figures = run_soak(60, seed)
    assert is_clean(figures), figures
