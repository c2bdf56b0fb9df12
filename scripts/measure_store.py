"""Measure what the rendezvous store costs as ranks are added: operations, discovery, links, and its steady load.

    python scripts/measure_store.py [--layout 4x4 --layout 8x56 ...] [--no-links] [--json FILE]

For each layout of STUDENTSxTEACHERS it starts that many processes on this machine (forked, so that torch is imported
once) around a store in a process of its own, and measures
  seen     seconds from a common start until every student has read every teacher's announcement,
  linked   until every student is linked with as many teachers as it keeps, through the same code as in a run,
  load     processor time of the store's process a second in the state afterwards, and what each operation costs it,
  student  processor seconds of the busiest student rank until it was linked with these.
With --no-links students and teachers only announce, send heartbeats and poll, as they do between links. First of all
it measures the cost of single operations, alone and from many clients at once. All figures are of one machine: its
cores are shared by the store and by all ranks, so times until linked are upper bounds of what a network of machines
needs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scale_tables import polls_per_second  # noqa: E402

from disaggkd_cli.config import TransportConfig  # noqa: E402
from disaggkd_cli.config.links import links_of_ranks  # noqa: E402
from disaggkd_cli.transport import (  # noqa: E402
    Identity,
    TeacherPool,
    discovery,  # noqa: E402
    open_store,
    rendezvous,
    serve,
)
from disaggkd_cli.transport import server as server_module  # noqa: E402
from disaggkd_cli.transport.announced import Invitations, Roster  # noqa: E402
from disaggkd_cli.transport.neighbours import neighbouring  # noqa: E402

LAYOUTS = ("1x1", "1x7", "4x4", "4x28", "8x8", "16x16")
LINKS = TransportConfig().links_per_rank
WAIT = 120.0
CONTEXT = multiprocessing.get_context("fork")
Pipe = multiprocessing.connection.Connection


def processor_seconds() -> float:
    """Processor time that this process has used."""
    return time.process_time()


def serve_store(pipe: Pipe) -> None:
    """The store's process: says its port, and its processor time whenever asked."""
    store = open_store("127.0.0.1:0", host_it=True)
    pipe.send(store.port)
    while pipe.recv() != "end":
        pipe.send(processor_seconds())


class StoreProcess:
    """A store in a process of its own."""

    def __enter__(self) -> StoreProcess:
        self.pipe, other = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=serve_store, args=(other,), daemon=True)
        self.process.start()
        self.endpoint = f"127.0.0.1:{self.pipe.recv()}"
        return self

    def spent(self) -> float:
        """Processor seconds that the process has used."""
        self.pipe.send("spent")
        return self.pipe.recv()

    def __exit__(self, *_: object) -> None:
        self.pipe.send("end")
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()


# Single operations


def hammer(endpoint: str, seconds: float, start: multiprocessing.synchronize.Barrier, results: object) -> None:
    """Add 0 to a counter as fast as the store answers."""
    store = open_store(endpoint, host_it=False)
    start.wait(WAIT)
    count, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        store.add("counter", 0)
        count += 1
    results.put(count)


def measure_operations(clients: tuple[int, ...], seconds: float = 2.0) -> list[dict]:
    """Operations per second of all clients together, and the store's processor time for each."""
    rows = []
    for count in clients:
        with StoreProcess() as store:
            start, results = CONTEXT.Barrier(count + 1), CONTEXT.Queue()
            ranks = [
                CONTEXT.Process(target=hammer, args=(store.endpoint, seconds, start, results), daemon=True)
                for _ in range(count)
            ]
            for rank in ranks:
                rank.start()
            start.wait(WAIT)
            before = store.spent()
            done = sum(results.get(timeout=WAIT) for _ in ranks)
            spent = store.spent() - before
            for rank in ranks:
                rank.join(10)
        rows.append({"clients": count, "operations_per_second": done / seconds, "store_seconds_each": spent / done})
    return rows


# Layouts


def student_rank(endpoint: str, index: int, students: int, teachers: int, links: bool, start: object, results: object,
                 end: object) -> None:  # fmt: skip
    """A student rank as far as the store and the links are concerned."""
    torch.set_num_threads(1)
    store = open_store(endpoint, host_it=False)
    start.wait(WAIT)
    began, spent = time.monotonic(), processor_seconds()
    if links:
        pool = TeacherPool(store, Identity(f"student {index}", hidden_size=8), timeout=WAIT, teacher_wait=WAIT,
                           leader=index == 0, rank=index, ranks=students)  # fmt: skip
        wanted = len(neighbouring(range(teachers), index, students, LINKS))
        seen = wait_for(lambda: len(pool.stats()) >= teachers, began)
        linked = wait_for(lambda: pool.teachers >= wanted, began)
        results.put((processor_seconds() - spent, seen, linked))
        end.wait(WAIT)
        pool.close()
        return
    roster = Roster(store, print)
    seen, version = None, -1
    found: dict[int, Identity] = {}
    while not end.is_set():
        if (now_at := rendezvous.roster_version(store)) != version:
            version, found = now_at, roster.read()
        if seen is None and len(found) >= teachers:
            seen = time.monotonic() - began
            results.put((processor_seconds() - spent, seen, None))
        end.wait(discovery._DISCOVERY_SECONDS)


def teacher_rank(endpoint: str, index: int, links: bool, start: object, end: object) -> None:
    """A teacher rank as far as the store and the links are concerned."""
    torch.set_num_threads(1)
    identity = Identity(f"teacher {index}", hidden_size=8)
    store = open_store(endpoint, host_it=False)
    start.wait(WAIT)
    if links:
        stop = threading.Event()
        threading.Thread(target=lambda: (end.wait(WAIT), stop.set()), daemon=True).start()
        serve(lambda: store.clone(), identity, lambda request: torch.zeros(request.num_rows, 8), timeout=WAIT,
              student_wait=WAIT, stop=stop)  # fmt: skip
        return
    number, last = rendezvous.announce_teacher(store, identity), time.monotonic()
    invitations = Invitations(store, number, print)
    while not end.is_set():
        if time.monotonic() - last >= rendezvous.HEARTBEAT_SECONDS:
            rendezvous.record_heartbeat(store, number)
            last = time.monotonic()
        invitations.next()
        rendezvous.student_end(store)
        end.wait(server_module._WATCH_SECONDS)


def wait_for(reached: Callable[[], bool], began: float) -> float:
    """Seconds from `began` until `reached()`."""
    while not reached():
        if time.monotonic() - began > WAIT:
            raise TimeoutError(f"not reached within {WAIT:g} s")
        time.sleep(0.02)
    return time.monotonic() - began


def measure_layout(students: int, teachers: int, links: bool, steady_seconds: float) -> dict:
    """One layout: times until seen and linked (the slowest student's), and the store's load afterwards."""
    with StoreProcess() as store:
        start, results, end = CONTEXT.Barrier(students + teachers + 1), CONTEXT.Queue(), CONTEXT.Event()
        common = (links, start)
        ranks = [
            CONTEXT.Process(target=student_rank, args=(store.endpoint, i, students, teachers, *common, results, end))
            for i in range(students)
        ] + [CONTEXT.Process(target=teacher_rank, args=(store.endpoint, i, *common, end)) for i in range(teachers)]
        for rank in ranks:
            rank.start()
        start.wait(WAIT)
        before_all = store.spent()
        answers = [results.get(timeout=WAIT) for _ in range(students)]
        joining = store.spent() - before_all
        before, began = store.spent(), time.monotonic()
        threads = max(threads_of(rank.pid) for rank in ranks[:students])
        time.sleep(steady_seconds)
        spent, elapsed = store.spent() - before, time.monotonic() - began
        end.set()
        for rank in ranks:
            rank.join(30)
            if rank.is_alive():
                rank.kill()
    return {
        "students": students,
        "teachers": teachers,
        "links": students * links_of_ranks(teachers, students, LINKS)[0] if links else 0,
        "seen_seconds": max(seen for _, seen, _ in answers),
        "linked_seconds": max(linked for *_, linked in answers) if links else None,
        "store_seconds_joining": joining,
        "student_seconds_joining": max(own for own, *_ in answers),
        "store_load": spent / elapsed,
        "operations_per_second_asked": polls_per_second(students, teachers, LINKS),
        "threads_of_a_student": threads,
    }


def threads_of(pid: int) -> int:
    """Threads of a process."""
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layout", action="append", help="STUDENTSxTEACHERS; may be repeated")
    parser.add_argument("--clients", type=int, action="append", help="of the single operations; may be repeated")
    parser.add_argument("--no-links", action="store_true")
    parser.add_argument("--steady", type=float, default=4.0, help="seconds of the steady state")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    operations = measure_operations(tuple(options.clients or (1, 8, 64)))
    print(f"{os.cpu_count()} cores, torch {torch.__version__}, {dist.TCPStore.__name__}")
    print(f"{'clients':>8} {'operations/s':>13} {'store, us each':>15}")
    for row in operations:
        each = 1e6 * row["store_seconds_each"]
        print(f"{row['clients']:8} {row['operations_per_second']:13,.0f} {each:15.1f}", flush=True)
    rows = []
    columns = ("students", "teachers", "links", "seen s", "linked s", "store load", "polls/s", "threads", "student s")
    print("".join(f"{column:>11}" for column in columns))
    for layout in options.layout or LAYOUTS:
        students, teachers = map(int, layout.split("x"))
        row = measure_layout(students, teachers, not options.no_links, options.steady)
        rows.append(row)
        linked = "" if row["linked_seconds"] is None else f"{row['linked_seconds']:.2f}"
        print(f"{students:11}{teachers:11}{row['links']:11}{row['seen_seconds']:11.2f}{linked:>11}"
              f"{row['store_load']:11.3f}{row['operations_per_second_asked']:11,.0f}{row['threads_of_a_student']:11}"
              f"{row['student_seconds_joining']:11.3f}",
              flush=True)  # fmt: skip
    if options.json:
        machine = {"cores": os.cpu_count(), "torch": torch.__version__}
        options.json.write_text(json.dumps({**machine, "operations": operations, "layouts": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
