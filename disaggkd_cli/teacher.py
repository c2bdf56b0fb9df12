"""One teacher replica: answers requests with the final hidden states of the rows that count. It keeps no state."""

from __future__ import annotations

import signal
import threading

import torch
from torch import Tensor, nn

from disaggkd_cli.config import Config
from disaggkd_cli.data import load_tokenizer, position_ids_from_lengths, tokenizer_fingerprint
from disaggkd_cli.data.batch import lengths_by_row
from disaggkd_cli.errors import RunError
from disaggkd_cli.launch import Place
from disaggkd_cli.models import (
    backbone_of,
    decide_packing,
    head_of,
    hidden_states,
    load_causal_lm,
    model_fingerprint,
    resolve_source,
    verify_packing,
    verify_split,
)
from disaggkd_cli.models.load import DTYPES
from disaggkd_cli.runtime import logger, meet, set_up
from disaggkd_cli.training.run_directory import RunDirectory
from disaggkd_cli.transport import Identity, Request, serve


def run_teacher(config: Config, place: Place, directory: RunDirectory | None) -> str:
    """Load the teacher, prove its split, and serve until the student has ended; return why serving ended.

    Raises:
        UserError: the model cannot be read, split or packed; or no student belongs to it.
        RunError: the rendezvous or the student is gone for longer than `transport.teacher_wait`.
    """
    device = set_up(config, place, directory)
    source = resolve_source(config.teacher.model, trust_remote_code=config.teacher.trust_remote_code)
    logger.info("loading %s", source.name)
    model = load_causal_lm(source, DTYPES[config.teacher.dtype], "teacher.model").to(device)
    head = head_of(model)
    verify_split(model, head, f"teacher.model {source.name}")
    vocabulary, width = head.weight.shape
    backbone = backbone_of(model)
    if decide_packing(config)[0]:
        verify_packing(backbone, vocabulary, f"teacher.model {source.name}")
    identity = Identity(
        role=place.name,
        teacher_fingerprint=model_fingerprint(source),
        tokenizer_fingerprint=tokenizer_fingerprint(load_tokenizer(config.teacher.model)),
        vocabulary_size=vocabulary,
        hidden_size=width,
        wire_dtype=config.transport.dtype,
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    wait = config.transport.teacher_wait
    met = [meet(config, place, timeout=wait)]
    served = serve(
        lambda: met.pop() if met else meet(config, place, timeout=wait),
        identity,
        lambda request: teacher_rows(backbone, request, device),
        timeout=config.transport.timeout,
        student_wait=wait,
        bind=config.launch.bind,
        checksum=config.transport.checksum,
        stop=stop,
        on_event=logger.info,
    )
    logger.info(
        "%s: answered %d requests (%d rows), idle %.0f%%", served.reason, served.requests, served.rows,
        100 * served.idle_share,
    )  # fmt: skip
    if served.reason == "student vanished":
        raise RunError(f"{place.name}: no student for transport.teacher_wait={wait:g} s")
    return served.reason


@torch.inference_mode()
def teacher_rows(backbone: nn.Module, request: Request, device: torch.device) -> Tensor:
    """Return the hidden states [R, H_t] that a request asks for."""
    input_ids = request.input_ids.long().to(device)
    positions = position_ids_from_lengths(lengths_by_row(request.document_lengths, input_ids.shape[1])).to(device)
    states = hidden_states(backbone, input_ids, positions)
    return states.reshape(-1, states.shape[-1])[request.rows.long().to(device)]
