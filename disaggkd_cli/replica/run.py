"""One rank of a replica from its first hello to its end: load, take part in every round, serve, leave together."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from disaggkd_cli.config import Config
from disaggkd_cli.errors import RunError
from disaggkd_cli.launch import Place
from disaggkd_cli.models import requested_states
from disaggkd_cli.models.verified import VerifiedTeacher
from disaggkd_cli.replica.ending import ReplicaBroken
from disaggkd_cli.replica.rounds import LEADER, Rounds
from disaggkd_cli.replica.world import LEAVE_SECONDS, World, end_soon
from disaggkd_cli.transport import Request

logger = logging.getLogger("disaggkd")
Forward = Callable[[Request], Tensor]
Load = Callable[[Config, torch.device, dist.ProcessGroup], VerifiedTeacher]
Outcome = TypeVar("Outcome")


def run_replica(
    config: Config,
    place: Place,
    device: torch.device,
    stop: threading.Event,
    loaded: Callable[[], None],
    teach: Callable[[VerifiedTeacher, Forward], Outcome],
    *,
    load: Load,
    shared: bool,
) -> Outcome | None:
    """Run this rank of a replica to its end and return what `teach` returned (None where this rank serves nobody).


    Args:
        stop: ends serving when set; it is set here when another rank of the replica stops.
        loaded: called once the teacher is there, in this thread.
        teach: serves with a forward, in a thread of its own, until it is done.
        load: gives this rank's part of the teacher, which takes part in every forward. Collective over the group.
        shared: rank 0 serves, and all compute each of its requests; else every rank serves requests of its own.

    Raises:
        UserError: the teacher cannot be read, proved or spread so.
        RunError: a rank of the replica is lost; the replica ends as a whole.
    """
    world = World(config, place, device)
    logger.info("replica %d: %d ranks have met, loading (%s)", place.replica, place.size, config.teacher.parallelism)
    teacher = load(config, device, world.group)
    loaded()
    world.shorten_timeouts()
    rounds, conversations = _open_rounds(config, world, stop, shared)

    def forward(request: Request) -> Tensor:
        states = requested_states(teacher.backbone, request.input_ids, request.document_lengths, request.rows, device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # whoever sends it then need not queue behind a next round
        return states

    def serve_alone(computed: Forward) -> Outcome | None:
        if shared and place.rank != LEADER:
            while not stop.wait(3600):
                pass
            return None
        if device.type != "cuda":
            return teach(teacher, computed)
        torch.cuda.set_device(device)
        with torch.cuda.stream(torch.cuda.Stream(device)):
            return teach(teacher, computed)

    forward(IDLE)  # what is slow the first time is slow for all ranks at once, before anybody is served
    try:
        outcome = take_part(rounds, forward, teacher.vocabulary_size, serve_alone, stop)
    except BaseException:
        for conversation in conversations:
            conversation.drop()
        raise
    finally:
        logger.info("%s: %d rounds, %d of them idle", place.name, rounds.begun, rounds.idle_rounds)
    for conversation in conversations:
        conversation.close()
    world.end()
    return outcome


IDLE = Request(
    0, torch.zeros(1, 2, dtype=torch.int32), torch.tensor([2], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
)
"""What a rank computes that has no request while others have: two tokens, the answer unread."""


def take_part(
    rounds: Rounds,
    forward: Forward,
    vocabulary_size: int,
    serve: Callable[[Forward], Outcome],
    stop: threading.Event,
) -> Outcome:
    """Run rounds in this thread and `serve` in another, until all ranks have left; return what `serve` returned.

    A request that a model would refuse halfway is refused before a round. Whatever else a forward raises ends the
    replica, since the other ranks wait inside it.

    Raises:
        RunError: a rank is lost, or the forward failed.
        DisaggkdError: what `serve` raised.
    """
    outcome: list[Outcome] = []
    failure: list[BaseException] = []

    def compute(request: Request) -> Tensor:
        ids = request.input_ids
        if ids.numel() and not (0 <= int(ids.min()) and int(ids.max()) < vocabulary_size):
            raise ValueError(f"request {request.request_id} has token ids outside of 0 … {vocabulary_size - 1}")
        return rounds.compute(request)

    def serving() -> None:
        try:
            outcome.append(serve(compute))
        except BaseException as error:  # raised again below, in the thread whose end is the process's
            failure.append(error)
        finally:
            rounds.leave()

    server = threading.Thread(target=serving, name="serve", daemon=True)
    server.start()
    try:
        while (begun := rounds.next()) is not None:
            try:
                rounds.finish(begun, forward(begun.request or IDLE))
            except Exception as error:
                message = f"{rounds.name}: the forward of round {begun.number} failed: {type(error).__name__}: {error}"
                rounds.fail(RunError(message))
                raise RunError(message) from error
    except RunError:
        stop.set()
        server.join(LEAVE_SECONDS)  # it says goodbye to the students, who then ask others at once
        raise
    server.join()
    for error in failure:
        if not isinstance(error, ReplicaBroken):
            raise error
    return outcome[0]


def _open_rounds(config: Config, world: World, stop: threading.Event, shared: bool) -> tuple[Rounds, list]:
    def lost(error: RunError) -> None:
        if rounds.fail(error):
            end_soon(world.name, error)

    conversations = world.converse(lambda *message: rounds.hear(*message), lost)
    rounds = Rounds(
        world.name,
        world.rank,
        {rank: conversation.say for rank, conversation in conversations.items()},
        {rank: world.names[rank] for rank in conversations},
        shared=shared,
        leave_seconds=world.timeout + LEAVE_SECONDS,
        on_leave=stop.set,
    )
    for conversation in conversations.values():
        conversation.start()
    return rounds, list(conversations.values())
