"""The end of a process that has said its last word: it comes in bounded time, whatever still hangs."""

from __future__ import annotations

import os
import signal
import threading

END_SECONDS = 30.0


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
