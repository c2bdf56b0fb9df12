"""The end of a process that has said its last word: it comes in bounded time, whatever still hangs."""

from __future__ import annotations

import os
import signal
import threading

END_SECONDS = 30.0
_bounded = False


def bound_end() -> None:
    """Note that this process is a rank: its end, when the command line has said its last word, must come in time."""
    global _bounded
    _bounded = True


def end_if_rank(code: int) -> None:
    """See `end_within`, for a process that has called `bound_end`; nothing for others."""
    if _bounded:
        end_within(code)


def end_within(code: int, seconds: float = END_SECONDS) -> None:
    """See to it that this process ends with `code` after `seconds`, should it not have ended by itself.

    A thread that writes to a disk that hangs keeps Python from ending, and so does what libraries do at exit; a timer
    ends those. The taking apart of a wedged CUDA context happens after Python has gone: there the kernel's alarm ends
    the process twice as late, by SIGALRM.
    """
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 2 * seconds)
