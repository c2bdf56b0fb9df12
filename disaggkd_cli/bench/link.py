"""`disaggkd bench link`: what links carry against raw gloo in the same run, round trips, and how much a ring hides.

Teacher processes stand against this process, over loopback. For each payload size and number of links these take
turns, between the same processes, threads and buffers:
  raw    `ProcessGroupGloo.send/recv` of the payload alone,
  link   header, validation and payload through `Link`, as a teacher sends them,
and so do these:
  ring   the whole way: request, reply, finiteness check, slot and lease, without and with the checksum.
Rates are medians over the turns, ratios medians of the ratios of neighbouring turns: other work on the machine slows
both of a pair down.
The overlap rows run a teacher and a student that each just wait.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from disaggkd_cli.errors import RunError
from disaggkd_cli.transport import HiddenStateRing, Identity, Request, TeacherPool, open_store, serve
from disaggkd_cli.transport.backends import open_payloads
from disaggkd_cli.transport.link import STUDENT, TEACHER, Link, form_link
from disaggkd_cli.transport.pair import Tag
from disaggkd_cli.transport.protocol import Header, Kind
from disaggkd_cli.transport.slots import Slot, make_slots
from disaggkd_cli.units import format_bytes

WIDTH = 2048
BYTES_PER_ROW = 2 * WIDTH
PAYLOADS = (64 * 2**10, 2**20, 8 * 2**20, 32 * 2**20)
TIMEOUT = 60.0
_FEWEST_MESSAGES = 4


@dataclass(frozen=True)
class LinkRow:
    """Rates are sums over all links, in bytes per second; `checksum_bytes_per_second` is the ring with crc32 on.

    `link_to_raw` is the median over neighbouring turns, not the ratio of the two medians.
    """

    payload_bytes: int
    links: int
    bytes_per_second: float
    raw_bytes_per_second: float
    link_to_raw: float
    ring_bytes_per_second: float
    checksum_bytes_per_second: float
    round_trip_seconds: float


@dataclass(frozen=True)
class OverlapRow:
    """Mean time of a step when the teacher takes `teacher_seconds` and the student `student_seconds` for each."""

    ring_depth: int
    teacher_seconds: float
    student_seconds: float
    step_seconds: float


def bench_link(
    payloads: tuple[int, ...] = PAYLOADS,
    links: tuple[int, ...] = (1, 2, 4),
    volume: int = 128 * 2**20,
    rounds: int = 20,
    overlap_steps: int = 40,
    log: Callable[[str], None] = lambda line: None,
) -> dict:
    """Measure and return `{machine, rows: [LinkRow...], overlap: [OverlapRow...]}` as plain dicts.

    Args:
        payloads: payload sizes in bytes, multiples of `BYTES_PER_ROW`.
        links: numbers of links, each to a process of its own.
        volume: bytes that all links together carry in one turn (at least `_FEWEST_MESSAGES` payloads each).
        rounds: how often the two of a comparison take turns.
        overlap_steps: steps per ring depth of the overlap table; 0 leaves it out.
    """
    torch.set_num_threads(1)
    rows = []
    for count in links:
        plan = [(size, max(_FEWEST_MESSAGES, min(50, volume // size // count))) for size in payloads]
        linked, whole = _measure_links(count, plan, rounds), _measure_ring(count, plan, rounds)
        for (size, _), (raw, link, ratio), (ring, checked, trip) in zip(plan, linked, whole, strict=True):
            rows.append(LinkRow(size, count, link, raw, ratio, ring, checked, trip))
            log(_format_row(rows[-1]))
    overlap = [_measure_overlap(depth, overlap_steps) for depth in (1, 2, 3)] if overlap_steps else []
    machine = {"cores": os.cpu_count(), "torch": torch.__version__, "python": sys.version.split()[0]}
    return {"machine": machine, "rows": [asdict(row) for row in rows], "overlap": [asdict(row) for row in overlap]}


def format_link_report(report: dict) -> str:
    """Return the measurements as the table that the command prints."""
    machine = report["machine"]
    lines = [
        f"Links over loopback, {machine['cores']} cores, torch {machine['torch']} (GB/s, all links together; ring: the "
        "whole way into a lease)",
        f"{'payload':>10} {'links':>5} {'raw gloo':>9} {'link':>9} {'link/raw':>8} {'ring':>9} {'ring+crc':>9} "
        f"{'round trip':>10}",
    ]
    lines += [_format_row(LinkRow(**row)) for row in report["rows"]]
    for row in map(lambda fields: OverlapRow(**fields), report["overlap"]):
        lines.append(
            f"ring depth {row.ring_depth}: teacher {1000 * row.teacher_seconds:.0f} ms and student "
            f"{1000 * row.student_seconds:.0f} ms take {1000 * row.step_seconds:.1f} ms a step"
        )
    return "\n".join(lines)


def _format_row(row: LinkRow) -> str:
    rates = (row.raw_bytes_per_second, row.bytes_per_second)
    whole = (row.ring_bytes_per_second, row.checksum_bytes_per_second)
    return (
        f"{format_bytes(row.payload_bytes):>10} {row.links:>5} "
        + " ".join(f"{rate / 1e9:>9.2f}" for rate in rates)
        + f" {row.link_to_raw:>8.2f} "
        + " ".join(f"{rate / 1e9:>9.2f}" for rate in whole)
        + f" {1000 * row.round_trip_seconds:>7.2f} ms"
    )


# Raw gloo against Link


def _measure_links(count: int, plan: list[tuple[int, int]], rounds: int) -> list[tuple[float, float, float]]:
    """Return (raw rate, link rate, link to raw) for each payload of the plan."""
    store = open_store("127.0.0.1:0", host_it=True)
    endpoint = f"127.0.0.1:{store.port}"
    peers = _start(_send_payloads, [(endpoint, index, plan, rounds) for index in range(count)])
    try:
        links = [_form(store.clone(), index, STUDENT) for index in range(count)]
        figures = []
        for size, messages in plan:
            slots = [make_slots(2, size) for _ in links]
            seconds: dict[bool, list[float]] = {False: [], True: []}
            for as_link in _turns(rounds):
                began = time.perf_counter()
                _in_threads(_receive, [(*pair, messages, as_link) for pair in zip(links, slots, strict=True)])
                seconds[as_link].append(time.perf_counter() - began)
            figures.append(_compare(size * messages * count, seconds[False], seconds[True]))
        return figures
    finally:
        _end(peers)


def _form(store: dist.Store, index: int, side: int) -> Link:
    key, name = f"bench/{index}", f"bench link {index}"
    link = form_link(store, key, side, name=name, generation=1, timeout=TIMEOUT)
    identity = Identity(name)
    link.payloads = open_payloads(link, identity, identity, side, store, None, forming_timeout=TIMEOUT, bind="loopback")
    return link


def _turns(rounds: int) -> Iterator[bool]:
    """Yield who is next; who begins changes from round to round."""
    for number in range(rounds):
        yield from (False, True) if number % 2 else (True, False)


def _compare(moved: int, first: list[float], second: list[float]) -> tuple[float, float, float]:
    """Return the median rates of two kinds of turns that moved so many bytes each, and the median of their ratios."""
    ratio = statistics.median(one / other for one, other in zip(first, second, strict=True))
    return moved / statistics.median(first), moved / statistics.median(second), ratio


def _receive(link: Link, slots: list[Slot], messages: int, as_link: bool) -> None:
    link.send_header(Header(Kind.PING))
    if as_link:
        _receive_as_a_student_does(link, slots, messages)
        return
    for number in range(messages):
        link.pair.group.recv([slots[number % len(slots)].buffer], 1 - STUDENT, Tag.BENCH).wait()


def _receive_as_a_student_does(link: Link, slots: list[Slot], messages: int) -> None:
    before = None
    for number in range(messages):
        slot = slots[number % len(slots)]
        size = slot.buffer.numel()
        if link.receive_header().body_bytes != size:
            raise RunError("bench link: a header announces another size")
        if (body := link.inline_body()) is not None:
            slot.buffer.copy_(body)
            continue
        travelling = link.payloads.start_receive(slot, size)
        if before is not None:
            before.wait()
        before = travelling
    if before is not None:
        before.wait()


def _send_payloads(endpoint: str, index: int, plan: list[tuple[int, int]], rounds: int) -> None:
    torch.set_num_threads(1)
    store = open_store(endpoint, host_it=False, timeout=TIMEOUT)
    link = _form(store, index, TEACHER)
    group = link.pair.group
    for size, messages in plan:
        payload = torch.ones(size, dtype=torch.uint8)
        ready = Header(Kind.READY, body_bytes=size)
        for as_link in _turns(rounds):
            link.receive_header()
            if as_link:
                _send_as_a_teacher_does(link, ready, payload, messages)
            else:
                for _ in range(messages):
                    group.send([payload], 1 - TEACHER, Tag.BENCH).wait()


def _send_as_a_teacher_does(link: Link, ready: Header, payload: torch.Tensor, messages: int) -> None:
    before = None
    for _ in range(messages):
        staged = link.payloads.stage(payload)
        if link.carries(staged.numel()):
            announced = travelling = link.start_message(ready, staged)
        else:
            announced = link.start_header(ready)
            travelling = link.payloads.start(staged)
        if before is not None:
            before.wait()
        if announced is not travelling:
            announced.wait()
        before = travelling
    before.wait()


# The whole way


def _measure_ring(count: int, plan: list[tuple[int, int]], rounds: int) -> list[tuple[float, float, float]]:
    """Return (rate without checksum, rate with it, round trip of one row in seconds) for each payload of the plan."""
    with _Teachers(count, checksum=False) as plain, _Teachers(count, checksum=True) as checked:
        figures = []
        for size, messages in plan:
            rows = max(1, size // BYTES_PER_ROW)
            total = messages * count
            rings = {
                checksum: _ring(pool, (rounds + 1) * total, rows, depth=2 * count + 1)
                for checksum, pool in ((False, plain), (True, checked))
            }
            seconds: dict[bool, list[float]] = {False: [], True: []}
            for checksum in _turns(rounds + 1):  # the first round fills the rings and measures nothing
                began = time.perf_counter()
                for _ in range(total):
                    rings[checksum].take().release()
                seconds[checksum].append(time.perf_counter() - began)
            for ring in rings.values():
                ring.close()
            moved = rows * BYTES_PER_ROW * total
            rate, checked_rate, _ = _compare(moved, seconds[False][1:], seconds[True][1:])
            figures.append((rate, checked_rate, _round_trip(plain)))
        return figures


def _round_trip(pool: TeacherPool) -> float:
    ring = _ring(pool, 21, 1, depth=1)
    trips = []
    for _ in range(21):
        began = time.perf_counter()
        ring.take().release()
        trips.append(time.perf_counter() - began)
    ring.close()
    return statistics.median(trips)


def _measure_overlap(depth: int, steps: int, seconds: float = 0.05) -> OverlapRow:
    with _Teachers(1, pause=seconds) as pool:
        ring = _ring(pool, steps + 5, 64, depth)
        began = 0.0
        for step, lease in enumerate(ring):
            if step == 5:
                began = time.perf_counter()
            time.sleep(seconds)
            lease.release()
        elapsed = time.perf_counter() - began
        ring.close()
    return OverlapRow(depth, seconds, seconds, elapsed / steps)


class _Teachers:
    """`count` teacher processes and a pool that is linked to all of them."""

    def __init__(self, count: int, checksum: bool = True, pause: float = 0.0):
        self._count, self._checksum, self._pause = count, checksum, pause

    def __enter__(self) -> TeacherPool:
        self._store = open_store("127.0.0.1:0", host_it=True)
        endpoint = f"127.0.0.1:{self._store.port}"
        self._peers = _start(_teach, [(endpoint, i, self._checksum, self._pause) for i in range(self._count)])
        identity = Identity("student 0", hidden_size=WIDTH)
        self._pool = TeacherPool(self._store, identity, timeout=TIMEOUT, teacher_wait=TIMEOUT, leader=True)
        deadline = time.monotonic() + TIMEOUT
        while self._pool.teachers < self._count:
            if time.monotonic() > deadline:
                _end(self._peers)
                raise RunError(f"bench link: only {self._pool.teachers} of {self._count} teachers came")
            time.sleep(0.05)
        return self._pool

    def __exit__(self, *_: object) -> None:
        self._pool.close()
        _end(self._peers)


def _teach(endpoint: str, index: int, checksum: bool, pause: float) -> None:
    torch.set_num_threads(1)
    ready = torch.ones(max(PAYLOADS) // BYTES_PER_ROW, WIDTH, dtype=torch.bfloat16)

    def forward(request: Request) -> torch.Tensor:
        time.sleep(pause)
        return ready[: request.num_rows]

    identity = Identity(f"teacher {index}", hidden_size=WIDTH)
    connect = lambda: open_store(endpoint, host_it=False, timeout=TIMEOUT)  # noqa: E731
    serve(connect, identity, forward, timeout=TIMEOUT, student_wait=TIMEOUT, checksum=checksum)


def _ring(pool: TeacherPool, requests: int, rows: int, depth: int) -> HiddenStateRing:
    def stream() -> Iterator[Request]:
        ids = torch.zeros(1, rows, dtype=torch.int32)
        lengths, every = torch.tensor([rows], dtype=torch.int32), torch.arange(rows, dtype=torch.int32)
        for number in range(requests):
            yield Request(number, ids, lengths, every)

    return HiddenStateRing(stream(), depth, rows, WIDTH, "bfloat16", pool)


# Processes and threads


def _start(target: Callable, arguments: list[tuple]) -> list[multiprocessing.process.BaseProcess]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # torch is imported once, not once for each measurement
    peers = [context.Process(target=target, args=each, daemon=True) for each in arguments]
    for peer in peers:
        peer.start()
    return peers


def _end(peers: list[multiprocessing.process.BaseProcess]) -> None:
    for peer in peers:
        peer.join(10)
        if peer.is_alive():
            peer.kill()
            peer.join(10)


def _in_threads(function: Callable, calls: list[tuple]) -> None:
    failures: list[Exception] = []

    def guarded(*arguments: object) -> None:
        try:
            function(*arguments)
        except Exception as error:  # raised again below, in the calling thread
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
