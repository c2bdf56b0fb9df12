"""Are hidden states that came over a real link the ones that the teacher computed?"""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist
from torch import Tensor

from disaggkd_cli.checks.result import CheckResult, judge, not_applicable
from disaggkd_cli.checks.subject import Subject
from disaggkd_cli.errors import RunError
from disaggkd_cli.models import backbone_of, requested_states
from disaggkd_cli.training.schedule import WorkItem
from disaggkd_cli.training.sources import ColocatedSource, RemoteSource
from disaggkd_cli.transport import HiddenStateRing, Identity, Request, StopReason, TeacherPool, open_store, serve
from disaggkd_cli.transport.rendezvous import store_endpoint
from disaggkd_cli.wire import format_of

_SECONDS = 60.0


def check_remote(subject: Subject, store: dist.Store) -> CheckResult:
    """Send the sampled rows through a teacher that serves in a thread of its own, over loopback.

    Args:
        store: where the two meet.
    """
    if subject.config.mode == "colocated":
        return not_applicable("mode: colocated runs send no hidden states")
    dtype, depth = subject.config.transport.dtype, subject.config.transport.ring_depth
    wire = format_of(dtype)
    items = subject.work_items(ranks=1, micro_batch_sequences=1, accumulation=len(subject.sequences))
    local = [_local(subject, item) for item in items]
    remote, link = _through_the_link(subject, store, items)
    worst, bitwise = 0.0, True
    for here, there in zip(local, remote, strict=True):
        if here.shape != there.shape:
            raise RunError(f"the link delivered {tuple(there.shape)} where {tuple(here.shape)} was due")
        sent = here.to(there.dtype) if wire.is_exact else here
        bitwise &= torch.equal(sent, there)
        worst = max(worst, ((sent.double() - there.double()).norm() / sent.double().norm().clamp_min(1e-30)).item())
    rounding = max(
        ((here.double() - there.double()).norm() / here.double().norm().clamp_min(1e-30)).item()
        for here, there in zip(local, remote, strict=True)
    )
    rows = sum(map(len, remote))
    return judge(
        bitwise if wire.is_exact else worst <= wire.tolerance,
        f"{'bitwise equal' if bitwise else f'differs by {worst:.1e}'} in {dtype}; rounding to it costs {rounding:.1e}",
        f"{rows} rows in {len(items)} requests over a gloo link, a ring of {depth} and checksums "
        f"({link:,} payload bytes), against the same forward here",
        "what arrives is not what the teacher computed: rows, positions or bytes are wrong",
        difference=worst,
        rounding=rounding,
        payload_bytes=link,
    )


def _local(subject: Subject, item: WorkItem) -> Tensor:
    source = ColocatedSource(backbone_of(subject.teacher), iter([item]), subject.device)
    return source.take().hidden.cpu()


def _through_the_link(subject: Subject, store: dist.Store, items: list[WorkItem]) -> tuple[list[Tensor], int]:
    """Return what arrived for each item, and the payload bytes."""
    transport, width = subject.config.transport, subject.teacher_head.weight.shape[1]
    identity = Identity(
        "teacher", vocabulary_size=len(subject.teacher_head.weight), hidden_size=width, wire_dtype=transport.dtype
    )
    student = Identity("student 0", "", "", len(subject.teacher_head.weight), width, transport.dtype)
    pool = TeacherPool(store, student, timeout=_SECONDS, teacher_wait=_SECONDS, leader=True)
    stop = threading.Event()

    def forward(request: Request) -> Tensor:
        return requested_states(
            backbone_of(subject.teacher), request.input_ids, request.document_lengths, request.rows, subject.device
        )

    def teach() -> None:
        try:
            serve(
                lambda: open_store(store_endpoint(store), host_it=False, timeout=_SECONDS), identity, forward,
                timeout=_SECONDS, student_wait=_SECONDS, checksum=transport.checksum, stop=stop,
            )  # fmt: skip
        except Exception as error:  # raised again below, in the thread that asked
            pool.fail(error)

    teacher = threading.Thread(target=teach, name="teacher", daemon=True)
    teacher.start()
    try:
        pool.wait_for_teacher()
        rows = max(item.batch.supervised_count for item in items)
        source = RemoteSource(
            lambda requests: HiddenStateRing(requests, transport.ring_depth, rows, width, transport.dtype, pool),
            iter(items),
            torch.device("cpu"),
        )
        arrived = []
        for _ in items:
            taken = source.take()
            arrived.append(taken.hidden.clone())
            taken.release()
        received = source.figures().received_bytes
        source.close()
    finally:
        pool.close(StopReason.FINISHED)
        stop.set()
        teacher.join(timeout=_SECONDS)
    return arrived, received
