"""Run by torchrun: what the agreement of a replica's ranks adds to a forward, with one busy rank and the others idle.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=2 -m tests.distributed.support.replica_latency

Prints microseconds a round (median and 99th percentile) with a forward that computes nothing, for a busy leader and for
a busy other rank, and milliseconds a forward of the tiny teacher: whole in one rank, and sharded over all.
"""

import os
import threading
import time

import torch

from disaggkd_cli.config import Config
from disaggkd_cli.launch import Place
from disaggkd_cli.models import requested_states
from disaggkd_cli.models.verified import load_verified_teacher
from disaggkd_cli.replica.run import _open_rounds, take_part
from disaggkd_cli.replica.sharded import load_sharded_teacher
from disaggkd_cli.replica.world import World
from disaggkd_cli.transport import Request
from tests.support.runs import TINY_TEACHER

CPU = torch.device("cpu")


def quantiles(seconds: list[float], unit: float) -> str:
    ordered = sorted(seconds)
    return f"median {ordered[len(ordered) // 2] * unit:.0f}, 99% {ordered[int(len(ordered) * 0.99)] * unit:.0f}"


def measure(config, world, busy, request, forward, count) -> list[float]:
    """Return seconds of each of `count` answers on the busy rank, an empty list elsewhere."""
    stop = threading.Event()
    rounds, conversations = _open_rounds(config, world, stop, shared=False)

    def serve(compute):
        seconds = []
        for _ in range(count if world.rank == busy else 0):
            started = time.perf_counter()
            compute(request)
            seconds.append(time.perf_counter() - started)
        if world.rank != busy:
            stop.wait(300)
        return seconds

    seconds = take_part(rounds, forward, 1 << 30, serve, stop)
    for conversation in conversations:
        conversation.close()
    return seconds


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    config = Config()
    config.teacher.model, config.teacher.dtype, config.data.packing = str(TINY_TEACHER), "float32", "off"
    endpoint = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    request = Request(
        1, torch.ones(4, 48, dtype=torch.int32), torch.tensor([48] * 4, dtype=torch.int32),
        torch.arange(192, dtype=torch.int32),
    )  # fmt: skip
    nothing = torch.zeros(1)
    for attempt, (busy, what) in enumerate([(0, "leader"), (size - 1, "other rank")]):
        place = Place("teacher", rank, size, 0, rank, size, endpoint, attempt=attempt, launcher="torchrun")
        world = World(config, place, CPU)
        seconds = measure(config, world, busy, request, lambda _: nothing, 2000)
        if seconds:
            print(f"agreement, busy {what}: {quantiles(seconds[100:], 1e6)} microseconds a round", flush=True)
        world.end()
    world = World(config, Place("teacher", rank, size, 0, rank, size, endpoint, attempt=2, launcher="torchrun"), CPU)
    teachers = {"whole": load_verified_teacher(config, CPU), "sharded": load_sharded_teacher(config, CPU, world.group)}

    def forward_of(teacher):
        return lambda one: requested_states(teacher.backbone, one.input_ids, one.document_lengths, one.rows, CPU)

    if rank == 0:
        whole, seconds = forward_of(teachers["whole"]), []
        for _ in range(220):
            started = time.perf_counter()
            whole(request)
            seconds.append(time.perf_counter() - started)
        print(f"forward of 192 tokens, whole: {quantiles(seconds[20:], 1e6)} microseconds", flush=True)
    seconds = measure(config, world, 0, request, forward_of(teachers["sharded"]), 220)
    if seconds:
        print(f"forward of 192 tokens, sharded over {size}: {quantiles(seconds[20:], 1e6)} microseconds", flush=True)
    world.end()


if __name__ == "__main__":
    main()
