"""A process that has said its last word ends in time, with its code, whatever hangs in it."""

import subprocess
import sys

import pytest

from disaggkd_cli import exits

ENDING = "import atexit, ctypes, sys, threading, time\nfrom disaggkd_cli.exits import end_within\n"
HANGS = {
    "a thread": "threading.Thread(target=time.sleep, args=(100,)).start()",
    "a library at exit": "atexit.register(time.sleep, 100)",
    "nothing": "",
}


def ended(code):
    return subprocess.run([sys.executable, "-c", ENDING + code], timeout=20).returncode


@pytest.mark.parametrize("hang", HANGS.values(), ids=HANGS)
def test_what_hangs_while_python_ends(hang):
    assert ended(f"{hang}\nend_within(75, 0.3); sys.exit(75)") == 75


def test_what_hangs_when_python_has_gone():
    libc = "libc = ctypes.CDLL(None); libc.__cxa_atexit(ctypes.cast(libc.pause, ctypes.c_void_p), None, None)"
    assert ended(f"{libc}\nend_within(1, 0.3); sys.exit(1)") == -14


def test_only_ranks_are_ended(monkeypatch):
    asked = []
    monkeypatch.setattr(exits, "end_within", asked.append)
    monkeypatch.setattr(exits, "_bounded", False)
    exits.end_if_rank(2)
    exits.bound_end()
    exits.end_if_rank(75)
    assert asked == [75]
