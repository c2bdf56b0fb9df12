"""The environment variables that torch's NCCL groups and CUDA read, set once, before any thread of theirs runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_TORCHS_OWN_HANDLING = "3"
REQUIRED = {
    # A failing link's watchdog would tell every process of the run, through their store, to dump and end.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # A wait is the stream's and not the host's.
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}
DEFAULTS = {
    # There already, so that giving it another value for a moment moves nothing that another thread may be reading.
    _HANDLING: _TORCHS_OWN_HANDLING,
    # Transfers of links run beside the collectives of the student's ranks only on hardware queues of their own.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}


def prepare_nccl_environment() -> None:
    """Set what links need, before the first group and before CUDA starts; what the user set of `DEFAULTS` stays."""
    os.environ.update(REQUIRED)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


@contextmanager
def without_the_handler_that_ends_processes() -> Iterator[None]:
    """Let groups that are made meanwhile report a dead peer and not end the process; one thread at a time.

    A group reads this when it is made: those of a role's own ranks keep theirs. The variable stays in its place, so no
    other thread's look at the environment is disturbed.
    """
    before = os.environ.setdefault(_HANDLING, _TORCHS_OWN_HANDLING)
    os.environ[_HANDLING] = "0"
    try:
        yield
    finally:
        os.environ[_HANDLING] = before
