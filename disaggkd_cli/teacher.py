"""One teacher rank: answers requests with the final hidden states of the supervised rows. It keeps no state."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import torch
import transformers
from torch import Tensor, nn

from disaggkd_cli.config import Config
from disaggkd_cli.config.linear_attention import missing_kernels
from disaggkd_cli.data import load_tokenizer, tokenizer_fingerprint
from disaggkd_cli.errors import RunError
from disaggkd_cli.launch import Place
from disaggkd_cli.models import model_fingerprint, requested_states
from disaggkd_cli.models.verified import VerifiedTeacher, load_verified_teacher
from disaggkd_cli.planner.models import local_fields
from disaggkd_cli.runtime import logger, meet, run_secret, set_up
from disaggkd_cli.training.run_directory import RunDirectory
from disaggkd_cli.training.timeline import open_timeline
from disaggkd_cli.transport import Identity, Request, Served, serve
from disaggkd_cli.transport.probe import probe_of

Forward = Callable[[Request], Tensor]


def run_teacher(config: Config, place: Place, directory: RunDirectory | None) -> str:
    """Load the teacher, verify its split, and serve until the student has ended; return why serving ended.

    A rank of a replica of several takes part in all forwards of its replica besides; see `replica`.

    Raises:
        UserError: the model cannot be read, split, packed or sharded; or no student belongs to it.
        RunError: the rendezvous or the student is gone for longer than `transport.teacher_wait`, or a rank of this
            replica is lost.
    """
    device = set_up(config, place, directory)
    logger.info("loading %s", config.teacher.model)
    for line in missing_kernels(config, local_fields) if device.type == "cuda" else ():
        logger.warning("%s", line)
    stop = threading.Event()

    def teach(teacher: VerifiedTeacher, forward: Forward, at_once: int = 1) -> Served:
        timed = open_timeline(config, directory, place.name).timed(forward)
        return serve_students(config, place, device, teacher, timed, stop, at_once)

    if place.size > 1:
        from disaggkd_cli.replica import ENGINES, settle_layout

        served = ENGINES[settle_layout(config, device)](
            config, place, device, stop, lambda: _stop_at_signals(stop), teach
        )
    else:
        teacher = load_verified_teacher(config, device)
        _stop_at_signals(stop)
        served = teach(teacher, lambda request: teacher_rows(teacher.backbone, request, device))
    if served is None:
        return "told to stop"
    figures = (served.requests, served.rows, 100 * served.idle_share)
    logger.info("%s: answered %d requests (%d rows), idle %.0f%%", served.reason, *figures)
    if served.reason == "student vanished":
        raise RunError(f"{place.name}: no student for transport.teacher_wait={config.transport.teacher_wait:g} s")
    return served.reason


def _stop_at_signals(stop: threading.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())


def serve_students(
    config: Config,
    place: Place,
    device: torch.device,
    teacher: VerifiedTeacher,
    forward: Forward,
    stop: threading.Event,
    at_once: int = 1,
) -> Served:
    """Announce this rank as a teacher and answer requests until the student ends or `stop` is set.

    Args:
        at_once: how many threads may call `forward` at the same time.

    Raises:
        UserError: no student belongs to it.
        RunError: the rendezvous was never there, or forwards kept failing.
    """
    identity = Identity(
        role=place.name,
        teacher_fingerprint=model_fingerprint(teacher.source),
        tokenizer_fingerprint=tokenizer_fingerprint(load_tokenizer(config.teacher.model)),
        vocabulary_size=teacher.vocabulary_size,
        hidden_size=teacher.hidden_size,
        wire_dtype=config.transport.dtype,
        probe=probe_of(forward, teacher.vocabulary_size, config.transport.dtype),
        numerics=numerics_of(config, device),
    )
    wait = config.transport.teacher_wait
    met = [meet(config, place, timeout=wait)]
    return serve(
        lambda: met.pop() if met else meet(config, place, timeout=wait),
        identity,
        forward,
        timeout=config.transport.timeout,
        student_wait=wait,
        bind=config.launch.bind,
        find_secret=lambda store: run_secret(config, store),
        checksum=config.transport.checksum,
        device=device,
        backend=config.transport.backend,
        at_once=at_once,
        stop=stop,
        on_event=logger.info,
    )


def numerics_of(config: Config, device: torch.device) -> str:
    """Return, for messages, what decides the bits that this teacher computes besides its weights."""
    teacher = config.teacher
    layout = f"{teacher.parallelism} over {teacher.ranks_per_replica}" if teacher.ranks_per_replica > 1 else "one rank"
    return (
        f"{teacher.dtype}, attention {teacher.attention}, {layout}, {torch.get_num_threads()} threads, {device.type}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )


def teacher_rows(backbone: nn.Module, request: Request, device: torch.device) -> Tensor:
    """Return the hidden states [R, H_t] that a request asks for."""
    return requested_states(backbone, request.input_ids, request.document_lengths, request.rows, device)
