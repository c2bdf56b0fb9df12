"""Where the trainer gets the teacher's hidden states from: one interface, whether the teacher is here or elsewhere."""

from __future__ import annotations

import itertools
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from disaggkd_cli.data import MicroBatch
from disaggkd_cli.errors import RunError
from disaggkd_cli.models import hidden_states
from disaggkd_cli.training.schedule import WorkItem
from disaggkd_cli.transport import HiddenStateRing, Lease, Request


@dataclass
class TeacherRows:
    """One work item and the teacher's hidden states of its supervised rows.

    Attributes:
        item: what is to be computed now; items come in the order of the stream.
        hidden: [R, H_t], valid until `release`.
        stall_seconds: how long the trainer waited for it.
        release: gives the slot back; call it once the item's backward is done.
    """

    item: WorkItem
    hidden: Tensor
    stall_seconds: float
    release: Callable[[], None]


@dataclass
class SourceFigures:
    """What a source tells the metrics of the steps since it was last asked.

    Attributes:
        received_bytes: payload bytes that came over links.
        ring_fill: mean share of the ring's slots that lay ready when the trainer came to take one.
        teachers: by teacher, totals so far: requests, bytes, idle share, linked or not.
    """

    received_bytes: int = 0
    ring_fill: float = 0.0
    teachers: dict[str, Any] = field(default_factory=dict)


class HiddenStateSource(Protocol):
    """Hands the trainer work items with hidden states, in order."""

    asks_alone: bool
    """Whether `aside` is used by one rank alone; else by all student ranks in step."""

    def take(self) -> TeacherRows:
        """Return the next item; raises when no teacher can answer any more."""

    def aside(self, rows: int) -> AbstractContextManager[Callable[[MicroBatch], Tensor]] | None:
        """Ask the teacher something outside of the stream, a batch after the other, with at most `rows` rows each.

        Returns:
            a context whose value maps a batch to the hidden states [R, H_t] of its supervised rows, valid until the
            next call; None where no teacher is here to be asked.
        """

    def figures(self) -> SourceFigures:
        """Return the figures since the last call."""

    def close(self) -> None:
        """Stop prefetching and let go of every peer."""


class ColocatedSource:
    """The teacher on the student's own ranks, sharded with FSDP; all ranks take items in step.

    Args:
        backbone: the teacher's backbone in eval mode, as `shard_teacher` left it.
        items: the rank's stream.
        device: where it computes.
    """

    asks_alone = False

    def __init__(self, backbone: nn.Module, items: Iterator[WorkItem], device: torch.device) -> None:
        self._backbone = backbone
        self._items = items
        self._device = device

    @torch.no_grad()
    def take(self) -> TeacherRows:
        """Compute the next item's hidden states now; the whole forward counts as stall."""
        item = next(self._items)
        started = time.monotonic()
        hidden = self._forward(item.batch)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return TeacherRows(item, hidden, time.monotonic() - started, lambda: None)

    @torch.no_grad()
    def _forward(self, batch: MicroBatch) -> Tensor:
        batch = batch.to(self._device)
        states = hidden_states(self._backbone, batch.input_ids, batch.position_ids, batch.document_lengths)
        return states.reshape(-1, states.shape[-1])[batch.rows]

    def aside(self, rows: int) -> AbstractContextManager[Callable[[MicroBatch], Tensor]]:
        """The teacher is here."""
        return nullcontext(self._forward)

    def figures(self) -> SourceFigures:
        """Nothing travels."""
        return SourceFigures()

    def close(self) -> None:
        """Nothing to let go of."""


class RemoteSource:
    """Teachers on ranks of their own, read ahead through a ring.

    Args:
        ring_of: builds the ring from the iterator of requests (which the ring's own thread reads); with a number, one
            slot of so many rows instead of the run's.
        items: the rank's stream.
        device: where the student computes.
        asked: told the id of each request of the stream, as it is sent on its way.
    """

    asks_alone = True

    def __init__(
        self,
        ring_of: Callable[..., HiddenStateRing],
        items: Iterator[WorkItem],
        device: torch.device,
        asked: Callable[[int], None] = lambda request: None,
    ) -> None:
        self._tell = asked
        self._device = device
        self._ring_of = ring_of
        self._asked: deque[WorkItem] = deque()
        self._ring = ring_of(self._requests(items))

    def _requests(self, items: Iterator[WorkItem]) -> Iterator[Request]:
        for item in items:
            self._asked.append(item)
            self._tell(item.request_id)
            yield request_of(item)

    def take(self) -> TeacherRows:
        """Wait for the next item's hidden states, which usually lie ready."""
        lease = self._ring.take()
        item = self._asked.popleft()
        if lease.request_id != item.request_id:
            raise RunError(f"the ring delivered request {lease.request_id} where {item.request_id} was due")
        return TeacherRows(item, lease.hidden.to(self._device), lease.stall_seconds, lease.release)

    @contextmanager
    def aside(self, rows: int) -> Iterator[Callable[[MicroBatch], Tensor]]:
        """A ring of one slot beside the stream's: each request is known only once the last one is answered."""
        asked: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        ring = self._ring_of(iter(asked.get, None), rows)
        numbers = itertools.count()
        lease: Lease | None = None

        def states_of(batch: MicroBatch) -> Tensor:
            nonlocal lease
            if lease is not None:
                lease.release()
            asked.put(_request(next(numbers), batch))
            lease = ring.take()
            return lease.hidden.to(self._device)

        try:
            yield states_of
        finally:
            asked.put(None)
            ring.close()

    def figures(self) -> SourceFigures:
        """The ring's figures since the last call."""
        stats = self._ring.stats()
        return SourceFigures(stats["received_bytes"], stats["ring_fill"], stats["teachers"])

    def close(self) -> None:
        """Close the ring and its links."""
        self._ring.close()


def request_of(item: WorkItem) -> Request:
    """Return what a teacher needs to know of a work item: ids, document lengths, and which rows count."""
    return _request(item.request_id, item.batch)


def _request(request_id: int, batch: MicroBatch) -> Request:
    return Request(
        request_id=request_id,
        input_ids=batch.input_ids.to(torch.int32),
        document_lengths=batch.flat_document_lengths,
        rows=batch.rows.to(torch.int32),
    )
