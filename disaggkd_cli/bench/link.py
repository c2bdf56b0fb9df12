"""`disaggkd bench link`: what links carry against raw gloo in the same run, round trips, and how much a ring hides.

Teacher processes stand against this process, over loopback. For each payload size and number of links it measures in
turns, and reports the best turn of each kind (other work on the machine only ever slows a turn down):
  raw    `ProcessGroupGloo.send/recv` of the payload alone,
  link   header, validation and payload through `Link`,
  ring   the whole way: request, reply, finiteness check, slot and lease, without and with the checksum.
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

from disaggkd_cli.errors import RunError
from disaggkd_cli.transport import HiddenStateRing, Identity, Request, TeacherPool, open_store, serve
from disaggkd_cli.transport.link import STUDENT, TEACHER, Link, form_link
from disaggkd_cli.transport.protocol import Header, Kind
from disaggkd_cli.units import format_bytes

WIDTH = 2048
BYTES_PER_ROW = 2 * WIDTH
PAYLOADS = (64 * 2**10, 2**20, 8 * 2**20, 32 * 2**20)
TIMEOUT = 60.0


@dataclass(frozen=True)
class LinkRow:
    """Rates are sums over all links, in bytes per second; `checksum_bytes_per_second` is the ring with crc32 on."""

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
    volume: int = 64 * 2**20,
    rounds: int = 20,
    overlap_steps: int = 40,
    say: Callable[[str], None] = lambda line: None,
) -> dict:
    """Measure and return `{machine, rows: [LinkRow...], overlap: [OverlapRow...]}` as plain dicts.

    Args:
        payloads: payload sizes in bytes, multiples of `BYTES_PER_ROW`.
        links: numbers of links, each to a process of its own.
        volume: bytes that all links together carry in one turn (at least two payloads each).
        rounds: how often raw gloo, link and ring take turns; the best ones are reported.
        overlap_steps: steps per ring depth of the overlap table; 0 leaves it out.
    """
    torch.set_num_threads(1)
    rows = []
    for count in links:
        plan = [(size, max(2, min(50, volume // size // count))) for size in payloads]
        raw, linked = _measure_links(count, plan, rounds)
        whole = {checksum: _measure_ring(count, plan, rounds, checksum) for checksum in (False, True)}
        for position, (size, _) in enumerate(plan):
            rows.append(
                LinkRow(
                    payload_bytes=size,
                    links=count,
                    bytes_per_second=linked[position],
                    raw_bytes_per_second=raw[position],
                    link_to_raw=linked[position] / raw[position],
                    ring_bytes_per_second=whole[False][position][0],
                    checksum_bytes_per_second=whole[True][position][0],
                    round_trip_seconds=whole[False][position][1],
                )
            )
            say(_format_row(rows[-1]))
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


def _measure_links(count: int, plan: list[tuple[int, int]], rounds: int) -> tuple[list[float], ...]:
    """Return raw rates and link rates for each payload of the plan."""
    store = open_store("127.0.0.1:0", host_it=True)
    endpoint = f"127.0.0.1:{store.port}"
    peers = _start(_send_payloads, [(endpoint, index, plan, rounds) for index in range(count)])
    try:
        links = [
            form_link(store.clone(), f"bench/{i}", STUDENT, name=f"bench link {i}", generation=1, timeout=TIMEOUT)
            for i in range(count)
        ]
        raw, linked = [], []
        for size, messages in plan:
            buffers = [torch.zeros(size, dtype=torch.uint8) for _ in links]
            seconds: dict[bool, list[float]] = {False: [], True: []}
            for as_link in _turns(rounds):
                began = time.perf_counter()
                _in_threads(_receive, [(*pair, messages, as_link) for pair in zip(links, buffers, strict=True)])
                seconds[as_link].append(time.perf_counter() - began)
            moved = size * messages * count
            raw.append(moved / min(seconds[False]))
            linked.append(moved / min(seconds[True]))
        return raw, linked
    finally:
        _end(peers)


def _turns(rounds: int) -> Iterator[bool]:
    for _ in range(rounds):
        yield from (False, True)


def _receive(link: Link, buffer: torch.Tensor, messages: int, as_link: bool) -> None:
    link.send_header(Header(Kind.PING))
    group = link.control
    for _ in range(messages):
        if as_link:
            if link.receive_header().body_bytes != buffer.numel():
                raise RunError("bench link: a header announces another size")
            link.receive_payload(buffer)
        else:
            group.recv([buffer], 1 - STUDENT, 0).wait()


def _send_payloads(endpoint: str, index: int, plan: list[tuple[int, int]], rounds: int) -> None:
    torch.set_num_threads(1)
    store = open_store(endpoint, host_it=False, timeout=TIMEOUT)
    link = form_link(store, f"bench/{index}", TEACHER, name=f"bench link {index}", generation=1, timeout=TIMEOUT)
    group = link.control
    for size, messages in plan:
        payload = torch.ones(size, dtype=torch.uint8)
        for as_link in _turns(rounds):
            link.receive_header()
            for _ in range(messages):
                if as_link:
                    link.send_header(Header(Kind.READY, body_bytes=size))
                    link.send_payload(payload)
                else:
                    group.send([payload], 1 - TEACHER, 0).wait()


# The whole way


def _measure_ring(count: int, plan: list[tuple[int, int]], rounds: int, checksum: bool) -> list[tuple[float, float]]:
    """Return (bytes per second, round trip of one row in seconds) for each payload of the plan."""
    with _Teachers(count, checksum=checksum) as pool:
        figures = []
        for size, messages in plan:
            rows = max(1, size // BYTES_PER_ROW)
            total = messages * count
            ring = _ring(pool, (rounds + 1) * total, rows, depth=2 * count + 1)
            seconds = []
            for _ in range(rounds + 1):
                began = time.perf_counter()
                for _ in range(total):
                    ring.take().release()
                seconds.append(time.perf_counter() - began)
            rate = rows * BYTES_PER_ROW * total / min(seconds)
            ring.close()
            single = _ring(pool, 21, 1, depth=1)
            trips = []
            for _ in range(21):
                began = time.perf_counter()
                single.take().release()
                trips.append(time.perf_counter() - began)
            single.close()
            figures.append((rate, statistics.median(trips)))
        return figures


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


