"""A gloo process group of two as the transport uses it: transfers that are started, then waited for with a bound.

A send is a rendezvous: its bytes leave only once the peer has posted the receive. So a receive is started as early as
it may be, and a second message is started while the first one travels.
"""

from __future__ import annotations

import time
from datetime import timedelta
from enum import IntEnum
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from disaggkd_cli.addresses import loopback_address
from disaggkd_cli.transport.errors import LinkLost
from disaggkd_cli.transport.listeners import deafen, opening

STUDENT, TEACHER = 0, 1
FORMING_SECONDS = 10.0
CHUNK_BYTES = 64 * 2**20
"""Longer messages travel in pieces, so that the timeout bounds a piece and not a whole payload on a slow network."""


class Tag(IntEnum):
    """Streams of messages within a pair; order is kept within each, so one may be posted ahead of another."""

    HEADER = 0
    BODY = 1
    PAYLOAD = 2
    BENCH = 3


class Transfer(Protocol):
    """A message on its way."""

    def wait(self) -> None:
        """Return when the tensor may be used again (received: holds the message).

        When this returns or raises, the transfer is over: nothing reads or writes the tensor any more.

        Raises:
            LinkLost: it did not get through in time, or the peer is gone.
        """


class GlooPair:
    """One side of a pair group. Each direction of each tag is used by one thread at a time.

    Args:
        group: a process group of two; this side has rank `side`.
        name: what messages call the link, naming both sides.
        timeout: seconds that any one transfer may take once it is waited for.

    Attributes:
        group: the group; None once closed. Read from outside only to measure gloo itself.
    """

    def __init__(self, group: dist.ProcessGroup, side: int, name: str, timeout: float):
        self.name = name
        self.timeout = timeout
        self.peer = 1 - side
        self.group: dist.ProcessGroup | None = group

    @property
    def closed(self) -> bool:
        """Whether the pair has been dropped."""
        return self.group is None

    def start_send(self, message: Tensor, tag: Tag, what: str) -> GlooTransfer:
        """Start to send `message`, which stays untouched until the transfer is over.

        Raises:
            LinkLost: the pair is closed.
        """
        return self._start(True, message, tag, what)

    def start_receive(self, buffer: Tensor, tag: Tag, what: str) -> GlooTransfer:
        """Start to receive the next message of `tag` into `buffer`, which has exactly its size.

        Raises:
            LinkLost: the pair is closed.
        """
        return self._start(False, buffer, tag, what)

    def close(self) -> None:
        """Drop the group. Sockets close once no thread is inside a transfer."""
        self.group = None

    def _start(self, sends: bool, message: Tensor, tag: Tag, what: str) -> GlooTransfer:
        group = self.group
        verb = "send" if sends else "receive"
        if group is None:
            raise LinkLost(f"{self.name}: the link is closed, cannot {verb} {what}")
        transfer = GlooTransfer(self, verb, what, message)
        start = group.send if sends else group.recv
        try:
            for piece in message.split(CHUNK_BYTES):
                transfer.works.append(start([piece], self.peer, tag))
        except RuntimeError as error:
            transfer.fail(error)
        return transfer


class GlooTransfer:
    """A started transfer; it holds on to its tensor."""

    def __init__(self, pair: GlooPair, verb: str, what: str, message: Tensor):
        self.works: list[dist.Work] = []
        self.message = message
        self._pair = pair
        self._verb = verb
        self._what = what
        self._begun = time.monotonic()

    def wait(self) -> None:
        """See `Transfer.wait`."""
        self._begun = time.monotonic()
        try:
            while self.works:  # gloo counts: a second wait for one send would wait for another send
                # Said at each wait: the group's default does not reach transfers between two ranks, which would wait
                # for as long as forming the pair could have taken.
                self.works[0].wait(timedelta(seconds=self._pair.timeout))
                del self.works[0]
        except RuntimeError as error:
            self.fail(error)

    def fail(self, error: RuntimeError) -> None:
        """Close the pair and raise what became of the link."""
        pair = self._pair
        pair.close()
        seconds = time.monotonic() - self._begun
        cause = "the peer stalled" if seconds >= pair.timeout * 0.9 else "the peer is gone"
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise LinkLost(
            f"{pair.name}: could not {self._verb} {self._what} within {seconds:.1f} s (timeout {pair.timeout:g} s), "
            f"{cause}: {first_line}"
        ) from error


def forming_seconds(timeout: float) -> float:
    """Return how long both sides of a link wait for each other to form it; `timeout` is that of its transfers."""
    return min(FORMING_SECONDS, timeout)


def form_pair(
    store: dist.Store, key: str, side: int, *, name: str, timeout: float, forming_timeout: float, bind: str
) -> GlooPair:
    """Form the pair group `key` with the peer, which calls this with the other `side`.

    Raises:
        LinkLost: the peer did not come within `forming_timeout` seconds.
    """
    wait = timedelta(seconds=forming_timeout)
    store.set_timeout(wait)
    options = dist.ProcessGroupGloo._Options()
    device, listeners = opening(lambda: _device(bind))
    options._devices = [device]
    options._timeout = wait
    options._threads = 2
    try:
        group = dist.ProcessGroupGloo(dist.PrefixStore(key, store), side, 2, options)
    except RuntimeError as error:
        raise LinkLost(f"{name}: the peer did not come to form the link within {wait.total_seconds():g} s") from error
    deafen(listeners)
    group._set_default_timeout(timedelta(seconds=timeout))
    return GlooPair(group, side, name, timeout)


def _device(bind: str):
    if bind == "auto":
        return dist.ProcessGroupGloo.create_default_device()
    return dist.ProcessGroupGloo.create_device(hostname=loopback_address() if bind == "loopback" else bind)
