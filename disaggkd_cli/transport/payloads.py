"""How the payloads of one link travel: over a gloo pair from host memory, over gloo by way of page-locked staging
buffers, or (`nccl_payloads`) straight between two GPUs.

The teacher's sending thread calls `stage` and `start`; the student's receiving thread `start_receive`, and its thread
for arrivals waits for that and calls `received` and `commit`. A payload's receive is started only after its READY
has been validated, whatever the channel.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor

from disaggkd_cli.transport.cuda import Cuda, wait_for_event
from disaggkd_cli.transport.errors import LinkLost
from disaggkd_cli.transport.pair import GlooPair, Tag, Transfer
from disaggkd_cli.transport.slots import Slot

STAGING_BUFFERS = 2
"""One payload travels while the next one is brought to the host."""


class Arrived:
    """A payload that has been received already."""

    def wait(self) -> None:
        """See `Transfer.wait`."""


class PayloadChannel(Protocol):
    """Payloads of one link, in one direction.

    Attributes:
        backend: `gloo` or `nccl`.
        checksums: whether payloads pass through host memory, where a checksum can be taken.
        posted_ahead: whether `start` may be called while READY and the payload before still travel.
    """

    backend: str
    checksums: bool
    posted_ahead: bool

    def stage(self, payload: Tensor) -> Tensor:
        """Return `payload` (uint8, complete) as `start` takes it; the two last ones returned stay valid."""

    def start(self, staged: Tensor) -> Transfer:
        """Start to send what `stage` returned, after its READY."""

    def start_receive(self, slot: Slot, size: int) -> Transfer:
        """Start to receive the next payload, of exactly `size` bytes, for `slot`, behind those started before.

        Once `wait` of what this returns has returned or raised `LinkLost`, the transfer is over: nothing writes for
        `slot` any more. The same holds when this raises.
        """

    def received(self, slot: Slot, size: int) -> Tensor:
        """Return what has been received, to be looked at under `inspecting()`."""

    def inspecting(self) -> AbstractContextManager:
        """Return the context in which kernels that look at a payload run beside the trainer's."""

    def commit(self, slot: Slot, size: int) -> None:
        """Put the payload, once verified, where the trainer reads it, without waiting for it to be there."""

    def close(self) -> None:
        """Let go, from any thread; whoever waits in here is told within a moment or the link's timeout."""


class HostPayloads:
    """Host memory to host memory, over a gloo pair."""

    backend = "gloo"
    checksums = True
    posted_ahead = True

    def __init__(self, pair: GlooPair):
        self._pair = pair

    def stage(self, payload: Tensor) -> Tensor:
        """See `PayloadChannel.stage`."""
        return payload

    def start(self, staged: Tensor) -> Transfer:
        """See `PayloadChannel.start`."""
        return self._pair.start_send(staged, Tag.PAYLOAD, "a payload")

    def start_receive(self, slot: Slot, size: int) -> Transfer:
        """See `PayloadChannel.start_receive`."""
        return self._pair.start_receive(slot.host_buffer[:size], Tag.PAYLOAD, "a payload")

    def received(self, slot: Slot, size: int) -> Tensor:
        """See `PayloadChannel.received`."""
        return slot.host_buffer[:size]

    def inspecting(self) -> AbstractContextManager:
        """See `PayloadChannel.inspecting`."""
        return nullcontext()

    def commit(self, slot: Slot, size: int) -> None:
        """The bytes are in the slot already."""

    def close(self) -> None:
        """See `PayloadChannel.close`."""
        self._pair.close()


class StagedPayloads(HostPayloads):
    """GPU memory to GPU memory over gloo, by way of page-locked host memory; each copy on a stream of its own.

    The peer may be on the CPU: staging is each side's own affair.

    Args:
        pair: theirs alone.
        cuda: this side's device.
    """

    def __init__(self, pair: GlooPair, cuda: Cuda):
        super().__init__(pair)
        self._cuda = cuda
        self._stream = cuda.streams.borrow()
        self._kept: Any = self._stream
        self._guard = threading.Lock()
        self._staging: list[Tensor | None] = [None] * STAGING_BUFFERS
        self._next = 0

    def close(self) -> None:
        """See `PayloadChannel.close`; the stream goes to the next link, which runs behind what it still holds."""
        super().close()
        with self._guard:
            stream, self._kept = self._kept, None
        if stream is not None:
            self._cuda.streams.give_back(stream)

    def stage(self, payload: Tensor) -> Tensor:
        """Copy to the host and wait for the copy, in the sending thread; the next forward runs meanwhile."""
        size, buffer = payload.numel(), self._staging[self._next]
        if buffer is None or buffer.numel() < size:
            buffer = self._staging[self._next] = self._cuda.host_buffer(size)
        self._next = (self._next + 1) % STAGING_BUFFERS
        copied = self._cuda.event()
        with self._cuda.on(self._stream):
            self._cuda.copy(buffer[:size], payload)
            copied.record(self._stream)
        if not wait_for_event(copied, self._pair.timeout):
            self._pair.close()
            raise LinkLost(f"{self._pair.name}: a payload was not copied to the host in {self._pair.timeout:g} s")
        return buffer[:size]

    def commit(self, slot: Slot, size: int) -> None:
        """See `PayloadChannel.commit`."""
        with self._cuda.on(self._stream):
            self._stream.wait_event(slot.free)
            self._cuda.copy(slot.buffer[:size], slot.host_buffer[:size])
            slot.filled.record(self._stream)
