"""A rank that torch aborted over a stuck collective is explained on the last line."""

import signal
from types import SimpleNamespace

import pytest

from disaggkd_cli import supervise
from disaggkd_cli.collective_timeouts import stuck_collective
from disaggkd_cli.config import Config
from disaggkd_cli.errors import RunError
from disaggkd_cli.launch import STUDENT, Place
from disaggkd_cli.training.run_directory import RunDirectory

LINE = (
    "[rank1]:[E1218 20:27:21.43 ProcessGroupNCCL.cpp:629] [Rank 1] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=9, OpType=REDUCE_SCATTER, NumelIn=8, NumelOut=4, Timeout(ms)=660000) ran for 660088 milliseconds "
    "before timing out.\n"
)
TRACE = "frame #0: c10::Error::Error(...)\n" * 3000


def test_the_collective_is_found_above_torchs_trace(tmp_path):
    output = tmp_path / "student_1.out"
    output.write_text("loading\n" + LINE + TRACE)
    told = stuck_collective([("student 0", None), ("student 1", output)])
    assert told.startswith("student 1 waited 660 s in a collective (reduce_scatter)")


def test_nothing_is_said_without_it(tmp_path):
    (tmp_path / "a.out").write_text("Traceback\n")
    assert stuck_collective([("a", tmp_path / "a.out"), ("b", tmp_path / "missing.out")]) == ""


@pytest.mark.parametrize(("printed", "said"), [(LINE + TRACE, "reduce_scatter"), ("", "a collective waited too long")])
def test_the_last_line_of_a_run_names_it(tmp_path, monkeypatch, printed, said):
    def ended(rank, code):
        output = tmp_path / f"student_{rank}.out"
        output.write_text(printed if rank else "")
        process = SimpleNamespace(returncode=code, pid=0, poll=lambda: code, wait=lambda *_: code)
        return supervise.Child(Place(STUDENT, rank, 2), process, output if rank else None)

    supervisor = supervise._Supervisor(Config(), [], RunDirectory(tmp_path), "never", 0)
    students = [ended(0, -signal.SIGABRT), ended(1, -signal.SIGABRT)]
    with pytest.raises(RunError, match="was killed by SIGABRT") as raised:
        supervisor._student_died(students)
    assert said in str(raised.value) and "\n" not in str(raised.value)
