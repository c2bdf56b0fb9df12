"""A recording in the place of a live teacher: made for a config, and replayed to its student ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from disaggkd_cli.config import Config
from disaggkd_cli.data import load_splits, load_tokenizer, padding_id, tokenizer_fingerprint
from disaggkd_cli.errors import UserError
from disaggkd_cli.models import decide_packing, model_fingerprint, requested_states, teacher_source
from disaggkd_cli.models.recording import Recorder, Recording, RecordingIdentity, request_key
from disaggkd_cli.models.verified import load_verified_teacher
from disaggkd_cli.training.schedule import WorkItem, WorkPlan
from disaggkd_cli.training.sources import SourceFigures, TeacherRows, request_of
from disaggkd_cli.transport import Request
from disaggkd_cli.units import format_bytes
from disaggkd_cli.wire import FORMATS, format_of

Log = Callable[[str], None]


class RecordedSource:
    """Hidden states from disk, through the interface of every other source. Nothing waits, nothing travels.

    Args:
        recording: of this run's teacher and tokenizer.
        items: the rank's stream.
        device: where the student computes.
    """

    asks_alone = True

    def __init__(self, recording: Recording, items: Iterator[WorkItem], device: torch.device) -> None:
        self._recording = recording
        self._items = items
        self._device = device

    def take(self) -> TeacherRows:
        """Return the next item.

        Raises:
            UserError: its micro-batch was not recorded.
        """
        item = next(self._items)
        hidden = self._recording.hidden(key_of(request_of(item)))
        if hidden is None:
            raise UserError(
                f"teacher.cache: {self._recording.directory} holds no hidden states of request {item.request_id} (step "
                f"{item.step}): it was recorded with other texts, data.sequence_length, data.packing, seed, "
                "train.steps or train.micro_batch_sequences; record again with this config"
            )
        return TeacherRows(item, hidden.to(self._device), 0.0, lambda: None)

    def aside(self, rows: int) -> None:
        """Nobody is here to be asked."""
        return

    def figures(self) -> SourceFigures:
        """Everything always lies ready."""
        return SourceFigures(ring_fill=1.0)

    def close(self) -> None:
        """Nothing to let go of."""


def key_of(request: Request) -> str:
    """Return what a request is recorded under."""
    return request_key(request.input_ids, request.document_lengths, request.rows)


def recording_identity(config: Config, hidden_size: int) -> RecordingIdentity:
    """Return what a recording for this config must belong to.

    Raises:
        UserError: `transport.dtype` is more than the values themselves, which is all that a recording keeps.
    """
    if not format_of(config.transport.dtype).is_exact:
        exact = ", ".join(name for name, entry in FORMATS.items() if entry.is_exact)
        raise UserError(
            f"teacher.cache: recordings hold no {config.transport.dtype}; set transport.dtype to one of {exact}"
        )
    source = teacher_source(config)
    return RecordingIdentity(
        model_fingerprint(source),
        tokenizer_fingerprint(load_tokenizer(config.teacher.model)),
        hidden_size,
        config.transport.dtype,
    )


def open_recording(config: Config, hidden_size: int) -> Recording:
    """Return the recording that `teacher.cache` names.

    Raises:
        UserError: there is none, or it belongs to another teacher, tokenizer or dtype.
    """
    return Recording(Path(config.teacher.cache).expanduser(), recording_identity(config, hidden_size))


def record_run(config: Config, directory: Path, device: torch.device, log: Log) -> int:
    """Record what the teacher answers to every request of a run of this config; return the number recorded now.

    A micro-batch that returns (each evaluation reads the same ones) is recorded once. What the directory already holds
    is not computed again.

    Raises:
        UserError: a model or the texts cannot be read, the disk is too small, or the directory holds something else.
    """
    tokenizer = load_tokenizer(config.student.model or config.teacher.model)
    pack, _ = decide_packing(config)
    splits = load_splits(config.data, tokenizer, pack=pack, seed=config.seed)
    pad = padding_id(tokenizer)
    teacher = load_verified_teacher(config, device)
    recorder = Recorder(directory, recording_identity(config, teacher.hidden_size))
    plans = [WorkPlan(config, splits.train, splits.evaluation, rank, pad) for rank in range(config.student.ranks)]

    def requests() -> Iterator[tuple[str, Request]]:
        for plan in plans:
            for item in plan.items(0):
                request = request_of(item)
                yield key_of(request), request

    wanted = {key: request.num_rows for key, request in requests()}
    missing = {key: rows for key, rows in wanted.items() if key not in recorder.keys}
    size = format_of(recorder.identity.dtype).payload_bytes(sum(missing.values()), teacher.hidden_size)
    free = shutil.disk_usage(directory).free
    log(
        f"{len(wanted)} requests, {len(wanted) - len(missing)} of them recorded already; {sum(missing.values()):,} "
        f"rows to go, {format_bytes(size)} ({format_bytes(free)} free in {directory})"
    )
    if size > free:
        raise UserError(f"teacher.cache: {directory} has {format_bytes(free)} left; {format_bytes(size)} are needed")
    for key, request in requests():
        if key in missing and key not in recorder.keys:
            rows = requested_states(teacher.backbone, request.input_ids, request.document_lengths, request.rows, device)
            recorder.add(key, rows)
    recorder.flush()
    return len(missing)
