"""One rank of a pipeline from its first hello to its end: load a stage, join the ring, compute, leave together."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import torch
from torch import Tensor, nn

from disaggkd_cli.config import Config
from disaggkd_cli.data import lengths_by_row, position_ids_from_lengths, to_device
from disaggkd_cli.errors import RunError
from disaggkd_cli.launch import Place
from disaggkd_cli.models.stages import Stage
from disaggkd_cli.models.verified import VerifiedTeacher, verify_packed_documents
from disaggkd_cli.replica.ending import ReplicaBroken
from disaggkd_cli.replica.pipeline import Pipeline
from disaggkd_cli.replica.stage_links import StageInput, StageOutput
from disaggkd_cli.replica.staged import StagedTeacher, load_staged_teacher
from disaggkd_cli.replica.world import LEAVE_SECONDS, World, end_soon
from disaggkd_cli.training.run_directory import RunDirectory
from disaggkd_cli.training.stage_record import StageRecord, write_stage_record
from disaggkd_cli.transport import Identity, Request
from disaggkd_cli.transport.backends import describe_device
from disaggkd_cli.transport.cuda import cuda_of
from disaggkd_cli.transport.faults import Faults
from disaggkd_cli.transport.link import STUDENT, TEACHER

_RECORD_SECONDS = 5.0

logger = logging.getLogger("disaggkd")
Forward = Callable[[Request], Tensor]
Outcome = TypeVar("Outcome")


def run_stages(
    config: Config,
    place: Place,
    device: torch.device,
    stop: threading.Event,
    loaded: Callable[[], None],
    teach: Callable[[VerifiedTeacher, Forward, int], Outcome],
) -> Outcome | None:
    """Run this stage to its end and return what `teach` returned (None but on the first stage, which alone serves).

    Args:
        stop: ends serving when set; it is set here when another stage was told to stop.
        loaded: called once the stage is there, in this thread.
        teach: serves with a forward that so many threads may call at the same time, until it is done.

    Raises:
        UserError: the teacher cannot be read, proved or cut so.
        RunError: a stage is lost; the replica ends as a whole.
    """
    world = World(config, place, device)
    logger.info("replica %d: %d ranks have met, loading (pipeline)", place.replica, place.size)
    identity = Identity(place.name, **describe_device(device, config.transport.backend))
    teacher = load_staged_teacher(config, device, world, identity)
    loaded()
    world.shorten_timeouts()
    faults = Faults(f"stage {place.replica}.{place.rank}")
    pipeline = Pipeline(place.name, place.rank, place.size, stage_forward(teacher.stage, device, faults), stop)
    _join_ring(config, world, pipeline, teacher, device, faults)
    if pipeline.first:
        logger.info("replica %d: %d stages, at most %d requests inside", place.replica, place.size, pipeline.most)
    record = _Record(config, place, pipeline, teacher)
    record.start()
    try:
        outcome = serve_beside(pipeline, lambda: _teach(config, teacher, pipeline, device, teach), stop)
    except BaseException:
        pipeline.output.drop()
        pipeline.input.drop()
        raise
    finally:
        record.write()
        idle = 100 * pipeline.meter.idle_share()
        logger.info("%s: %d requests computed, idle %.0f%%", place.name, pipeline.computed, idle)
    pipeline.output.close()
    pipeline.input.close()
    world.end()
    return outcome


def serve_beside(pipeline: Pipeline, serve: Callable[[], Outcome], stop: threading.Event) -> Outcome | None:
    """Compute in this thread and, on the first stage, `serve` in another; return what it returned.

    Raises:
        RunError: a stage is lost.
        DisaggkdError: what `serve` raised.
    """
    outcome: list[Outcome] = []
    failure: list[BaseException] = []

    def serving() -> None:
        try:
            outcome.append(serve())
        except BaseException as error:  # raised again below, in the thread whose end is the process's
            failure.append(error)
        finally:
            pipeline.finish()

    server = threading.Thread(target=serving, name="serve", daemon=True)
    if pipeline.first:
        server.start()
    try:
        pipeline.run()
    except RunError:
        stop.set()
        if pipeline.first:
            server.join(LEAVE_SECONDS)  # it says goodbye to the students, who then ask others at once
        raise
    if not pipeline.first:
        return None
    server.join()
    for error in failure:
        if not isinstance(error, ReplicaBroken):
            raise error
    return outcome[0]


def stage_forward(stage: Stage, device: torch.device, faults: Faults) -> Callable[[Request, Tensor | None], Tensor]:
    """Return the forward of a stage for `Pipeline`."""

    @torch.no_grad()
    def compute(request: Request, received: Tensor | None) -> Tensor:
        documents = lengths_by_row(request.document_lengths, request.input_ids.shape[1])
        ids = to_device(request.input_ids.long(), device)
        positions = to_device(position_ids_from_lengths(documents), device)
        states = stage.forward(ids, positions, received, documents)
        if stage.last:
            states = states.reshape(-1, states.shape[-1])[to_device(request.rows.long(), device)]
        states = faults.at_forward(states.contiguous())
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # whoever sends it need not queue behind the next forward
        return states

    return compute


def _join_ring(
    config: Config, world: World, pipeline: Pipeline, teacher: StagedTeacher, device: torch.device, faults: Faults
) -> None:
    """Form the links from the stage before and to the next one, and start what listens and speaks there.

    Link k goes from stage k to the next. All ranks form theirs in the order of these numbers: nobody waits in a circle.
    """
    rank, cuda = world.rank, cuda_of(device)
    before, after = (rank - 1) % world.size, (rank + 1) % world.size

    def lost(error: RunError) -> None:
        if pipeline.fail(error):
            end_soon(world.name, error)

    for number in sorted((before, rank)):
        outwards = number == rank
        side, peer = (TEACHER, after) if outwards else (STUDENT, before)
        link = world.form_link(number, side, peer)
        identities = teacher.identities
        link.payloads = world.open_payloads(link, side, identities[rank], identities[peer], cuda)
        if outwards:
            pipeline.output = StageOutput(link, checksum=config.transport.checksum, faults=faults, lost=lost, cuda=cuda)
        else:
            dtype = teacher.anatomy.final_dtype if pipeline.first else teacher.anatomy.dtype
            pipeline.input = StageInput(
                link, width=teacher.hidden_size, dtype=dtype, cuda=cuda, hear=pipeline.hear, lost=lost
            )
    pipeline.input.start()
    pipeline.output.start()


def _teach(
    config: Config,
    teacher: StagedTeacher,
    pipeline: Pipeline,
    device: torch.device,
    teach: Callable[[VerifiedTeacher, Forward, int], Outcome],
) -> Outcome:
    dtype = next(teacher.stage.backbone.parameters()).dtype
    backbone = _WholeBackbone(pipeline.forward, dtype, device)
    verified = VerifiedTeacher(teacher.source, backbone, teacher.vocabulary_size, teacher.hidden_size)
    verify_packed_documents(config, verified)

    beside = torch.cuda.Stream(device) if device.type == "cuda" else None

    def forward(request: Request) -> Tensor:
        if beside is not None:
            # Each serving thread's own setting: what it copies and encodes must not queue behind this stage's forward.
            torch.cuda.set_device(device)
            torch.cuda.set_stream(beside)
        ids = request.input_ids
        if ids.numel() and not (0 <= int(ids.min()) and int(ids.max()) < teacher.vocabulary_size):
            raise ValueError(f"request {request.request_id} has token ids outside of 0 … {teacher.vocabulary_size - 1}")
        return pipeline.forward(request)

    return teach(verified, forward, pipeline.most)


class _Record:
    """Writes what this stage does beside its log, every few seconds."""

    def __init__(self, config: Config, place: Place, pipeline: Pipeline, teacher: StagedTeacher) -> None:
        self._logs = RunDirectory(Path(config.run_dir).expanduser()).logs
        self._place, self._pipeline, self._layers = place, pipeline, teacher.stage.layers
        self._warned = False

    def start(self) -> None:
        threading.Thread(target=self._write_always, name="stage record", daemon=True).start()

    def write(self) -> None:
        layers, pipeline = self._layers, self._pipeline
        share = round(pipeline.meter.idle_share(), 3)
        record = StageRecord(
            self._place.name, layers.start, layers.stop - 1, pipeline.computed, share, pipeline.most
        )  # fmt: skip
        try:
            write_stage_record(self._logs, record)
        except OSError as error:  # a full disk costs the record and not the run
            if not self._warned:
                logger.warning("%s: could not write its record: %s", self._place.name, error)
            self._warned = True

    def _write_always(self) -> None:
        while True:
            self.write()
            time.sleep(_RECORD_SECONDS)


class _WholeBackbone(nn.Module):
    """All stages, called as a backbone is."""

    def __init__(self, forward: Forward, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._all_stages = forward
        self.device_and_dtype = nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool = False) -> SimpleNamespace:
        starts = (position_ids == 0).reshape(-1).nonzero().reshape(-1).tolist()
        lengths = torch.tensor([*starts[1:], input_ids.numel()]) - torch.tensor(starts)
        request = Request(0, input_ids.int().cpu(), lengths.int(), torch.arange(input_ids.numel(), dtype=torch.int32))
        states = self._all_stages(request)
        return SimpleNamespace(last_hidden_state=states.view(*input_ids.shape, -1))
