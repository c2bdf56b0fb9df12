"""Why torch aborted a rank: the collective that its watchdog gave up, read from what the rank printed.

On a GPU nobody can raise an error out of a stuck NCCL collective: torch's watchdog prints which one it was and ends the
process with SIGABRT, so what a person sees last says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_TIMEOUT = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\(.*?OpType=(\w+).*?ran for (\d+) milliseconds"
)
_READ_BYTES = 1 << 20
"""Of the end of a rank's output; traces of the C++ side follow the line, some 20 KiB a thread."""


def stuck_collective(outputs: Iterable[tuple[str, Path | None]]) -> str:
    """Return which collective the first of some ranks waited for in vain, as part of a sentence; "" when none did.

    Args:
        outputs: a rank's name and the file that holds what it printed, if there is one.
    """
    for name, path in outputs:
        found = _TIMEOUT.search(_end_of(path)) if path is not None else None
        if found:
            operation, milliseconds = found[1].lower(), int(found[2])
            return (
                f"{name} waited {milliseconds / 1e3:,.0f} s in a collective ({operation}) that another rank never "
                "joined: that rank hangs or is gone"
            )
    return ""


def _end_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _READ_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
