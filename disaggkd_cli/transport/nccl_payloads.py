"""Payloads from GPU to GPU over a NCCL communicator of two, beside the link's gloo pair. Not yet run on a GPU.

What keeps the two sides from waiting inside kernels: the teacher says READY only when the payload lies complete, the
student posts its receive only after that READY, and asks only for slots whose last readers are done. So a receive
kernel runs for as long as the bytes take. Host threads of the link poll events; the trainer's thread never waits here.

A communicator has one issuing thread, and a process issues to one of them at a time. One that fails is aborted; where
that cannot be proved to have ended the transfer, nothing of this process's GPU state can be trusted: `ChannelWedged`.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from disaggkd_cli.transport.cuda import Cuda, device_thread, wait_for_event
from disaggkd_cli.transport.errors import ChannelWedged, LinkLost
from disaggkd_cli.transport.nccl_environment import without_the_handler_that_ends_processes
from disaggkd_cli.transport.nccl_store import NcclPairStore
from disaggkd_cli.transport.pair import TEACHER
from disaggkd_cli.transport.payloads import Arrived
from disaggkd_cli.transport.slots import Slot

MAX_CTAS = 4
"""Channels of a communicator, each a thread block and some MB of buffers; NCCL's own choice costs hundreds of MB."""
FORMING_SECONDS = 60.0
"""For a communicator to form and carry its first bytes; NCCL looks for its networks the first time."""
ABORT_SECONDS = 10.0
_WATCHDOG_SECONDS = 24 * 3600.0
"""The watchdog of torch ends the process; the bounds of this file come first."""
_PROBE_BYTES = 2**16

_issue = threading.Lock()
"""NCCL's guide: operations on several communicators of one device are not issued from several threads at once. The
probe, whose first call waits for the peer inside NCCL, goes without: a dead peer must not hold the other links up."""
_forming = threading.Lock()


class NcclPayloads:
    """See `PayloadChannel`. Form it with `form_nccl_payloads`.

    Args:
        group: a NCCL process group of two in which this side has rank `side`.
        store: the group's, which calls it from C++ and does not keep its Python half alive.
        side: `STUDENT` or `TEACHER`.
        cuda: this side's device.
        stream: borrowed from the device's; given back when the communicator is.
        name: of the link.
        timeout: seconds that a payload may take.
    """

    backend = "nccl"
    checksums = False
    posted_ahead = False

    def __init__(
        self, group: Any, store: dist.Store, side: int, cuda: Cuda, stream: torch.cuda.Stream, name: str, timeout: float
    ):
        self._group = group
        self._store = store
        self._peer = 1 - side
        self._cuda = cuda
        self._name = name
        self._timeout = timeout
        self._stream = stream
        self._closing = threading.Event()
        self._guard = threading.Lock()
        self._in_flight = False
        self._issue: AbstractContextManager = nullcontext()

    def stage(self, payload: Tensor) -> Tensor:
        """See `PayloadChannel.stage`."""
        return payload

    def start(self, staged: Tensor) -> NcclTransfer:
        """See `PayloadChannel.start`."""
        sent = self._cuda.event()
        self._post("send", staged, sent)
        return NcclTransfer(self, staged, sent)

    def start_receive(self, slot: Slot, size: int) -> Arrived:
        """Receive to the end: one communicator has one transfer at a time, so there is nothing to run ahead with."""
        with self._cuda.on(self._stream):
            self._stream.wait_event(slot.free)
        self._post("recv", slot.buffer[:size], slot.filled)
        self.await_done(slot.filled, "receive")
        return Arrived()

    def received(self, slot: Slot, size: int) -> Tensor:
        """See `PayloadChannel.received`."""
        return slot.buffer[:size]

    def inspecting(self) -> AbstractContextManager:
        """See `PayloadChannel.inspecting`."""
        return self._cuda.on(self._cuda.streams.inspecting())

    def commit(self, slot: Slot, size: int) -> None:
        """The bytes are in the slot already, and `filled` was recorded behind them."""

    def close(self) -> None:
        """Let the communicator go: at once when it is at rest, or else whoever waits for its payload aborts it."""
        self._closing.set()
        self._settle()

    def await_done(self, event: torch.cuda.Event, verb: str) -> None:
        """Wait until `event`, recorded behind a transfer, is done.

        Raises:
            LinkLost: it was not in time, or the link was closed; the communicator is aborted and the transfer over.
            ChannelWedged: it may not be over.
        """
        done = wait_for_event(event, self._timeout, self._closing.is_set)
        if self._closing.is_set():
            cause = "the link is closed"
        elif not done:
            cause = f"the peer stalled or is gone (timeout {self._timeout:g} s)"
        elif (error := self._group.get_error().name) != "SUCCESS":
            cause = f"NCCL reports {error}"
        else:
            self._settle(over=True)
            return
        # An event may be done because a failing communicator let its kernels go: nothing it brought is believed.
        self._abort(event, verb)
        raise LinkLost(f"{self._name}: could not {verb} a payload over NCCL: {cause}")

    def _settle(self, over: bool = False) -> None:
        """Give a closed channel's communicator up once no transfer is on its way; `over`: the one that was is over."""
        with self._guard:
            self._in_flight = self._in_flight and not over
            if self._in_flight or not self._closing.is_set() or self._group is None:
                return
            group, self._group = self._group, None

        def end() -> None:
            group.abort()
            self._cuda.streams.give_back(self._stream)

        device_thread(self._cuda, end, f"close: {self._name}").start()

    def _post(self, call: str, payload: Tensor, done: torch.cuda.Event) -> None:
        """Enqueue a transfer and record `done` behind it.

        Raises:
            LinkLost: the channel is closed, or NCCL refused; the communicator is aborted then.
        """
        with self._guard:
            if self._closing.is_set():
                raise LinkLost(f"{self._name}: the link is closed, cannot {call} a payload over NCCL")
            self._in_flight = True
        try:
            with self._issue, self._cuda.on(self._stream):
                start = self._group.send if call == "send" else self._group.recv
                work = start([payload], self._peer, 0)
                work.wait()  # lets the stream wait, not this thread
                done.record(self._stream)
        except RuntimeError as error:
            behind = self._cuda.event()
            with self._cuda.on(self._stream):
                behind.record(self._stream)
            self._abort(behind, call)
            raise LinkLost(f"{self._name}: NCCL refused to {call} a payload: {_first_line(error)}") from error

    def _abort(self, behind: torch.cuda.Event, verb: str) -> None:
        """Abort the communicator and prove by `behind` that its kernels are done.

        Raises:
            ChannelWedged: the one or the other did not happen in `ABORT_SECONDS`.
        """
        self._closing.set()
        group, store = self._group, self._store
        if group is None:
            return
        returned, let_go = threading.Event(), threading.Event()

        def abort() -> None:
            group.abort()
            returned.set()
            let_go.wait()  # a wedged group must not be destroyed: its destructor would wait for ever
            store.leave()

        device_thread(self._cuda, abort, f"abort: {self._name}").start()
        if not (returned.wait(ABORT_SECONDS) and wait_for_event(behind, ABORT_SECONDS)):
            raise ChannelWedged(
                f"{self._name}: could not {verb} a payload over NCCL, nor end the transfer by an abort within "
                f"{ABORT_SECONDS:g} s; this process ends without a save: go on from the last checkpoint with "
                "--resume auto"
            )
        self._group = None
        self._in_flight = False
        self._cuda.streams.give_back(self._stream)
        let_go.set()


class NcclTransfer:
    """A payload being sent; it holds on to its tensor."""

    def __init__(self, channel: NcclPayloads, payload: Tensor, sent: torch.cuda.Event):
        self.payload = payload
        self._channel = channel
        self._sent = sent

    def wait(self) -> None:
        """See `Transfer.wait` and `NcclPayloads.await_done`."""
        self._channel.await_done(self._sent, "send")


def make_nccl_group(store: dist.Store, side: int, device: torch.device) -> Any:
    """Return a NCCL process group of two over `store`, connected on `device`."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = MAX_CTAS
    options.config.blocking = 1  # those that do not block hang now and then; whoever forms one may give it up
    options._timeout = timedelta(seconds=_WATCHDOG_SECONDS)
    with _forming, without_the_handler_that_ends_processes():
        group = dist.ProcessGroupNCCL(store, side, 2, options)
    group.eager_connect_single_device(device)  # one communicator now, not another for each direction later
    return group


def form_nccl_payloads(
    store: dist.Store,
    side: int,
    cuda: Cuda,
    *,
    name: str,
    timeout: float,
    forming_timeout: float = FORMING_SECONDS,
) -> NcclPayloads:
    """Form the channel with the peer, which calls this with the other side, and send a probe through it.

    Raises:
        LinkLost: it did not form in `forming_timeout` seconds, or the probe did not come through whole.
    """
    store.set_timeout(timedelta(seconds=forming_timeout))
    own_store = NcclPairStore(store)
    formed: list[NcclPayloads] = []
    failed: list[Exception] = []
    decision, given_up = threading.Lock(), threading.Event()

    def form() -> None:
        channel = None
        stream = cuda.streams.borrow()
        try:
            with cuda.on(stream):
                group = make_nccl_group(own_store, side, cuda.device)
                channel = NcclPayloads(group, own_store, side, cuda, stream, name, forming_timeout)
                _probe(channel, side, cuda)
            channel._timeout, channel._issue = timeout, _issue
            with decision:
                if not given_up.is_set():
                    formed.append(channel)
        except Exception as error:  # raised again below, in the calling thread
            failed.append(error)
        # Whatever became of it: what the group's watchdog writes from now on is no other group's affair.
        own_store.leave()
        if channel is None:
            cuda.streams.give_back(stream)
        elif not formed:
            channel.close()

    # NCCL's own calls have no bound: a thread of its own may stay in one, this one does not.
    thread = device_thread(cuda, form, f"NCCL: {name}")
    thread.start()
    thread.join(forming_timeout)
    with decision:
        if formed:
            return formed[0]
        given_up.set()
    if failed and isinstance(failed[0], ChannelWedged):
        raise failed[0]
    cause = _first_line(failed[0]) if failed else f"nothing within {forming_timeout:g} s"
    raise LinkLost(f"{name}: no payloads over NCCL: {cause}")


def _probe(channel: NcclPayloads, side: int, cuda: Cuda) -> None:
    slot = Slot(cuda.device_buffer(_PROBE_BYTES), cuda)
    pattern = (torch.arange(_PROBE_BYTES) % 251).to(torch.uint8)
    if side == TEACHER:
        slot.buffer.copy_(pattern)
    cuda.finish()
    if side == TEACHER:
        channel.start(slot.buffer).wait()
        return
    channel.start_receive(slot, _PROBE_BYTES)
    with channel.inspecting():
        if not torch.equal(slot.buffer.cpu(), pattern):
            raise LinkLost("the probe arrived damaged")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
