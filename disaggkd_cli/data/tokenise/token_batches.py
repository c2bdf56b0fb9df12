"""The documents of one source as tokens, batch by batch, in the source's order, whoever computes them.

A batch also says where reading goes on after it and what was noticed in it, so that whoever keeps finished batches can
go on from there, and end with the same tokens and the same remarks as without the interruption.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from disaggkd_cli.data.notes import Notes
from disaggkd_cli.data.prompts_alone import is_prompt_alone, prompts_remark
from disaggkd_cli.data.read.cutting import TextCutter
from disaggkd_cli.data.read.documents import Document, PromptCompletion, Text
from disaggkd_cli.data.read.readers import Item, Place, read_items
from disaggkd_cli.data.read.source_files import SourceFiles
from disaggkd_cli.data.refusals import RefusedRecord, note_refused
from disaggkd_cli.data.tokenise.encoding import DocumentEncoder, EncodedDocument
from disaggkd_cli.errors import RunError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Position = tuple[int, Place]
"""(file, where in it): where reading begins or goes on."""
BEGINNING: Position = (0, (0, 0))

Progress = Callable[[str, int, float | None], None]
"""Called with what is being done, how many documents are done, and which share of all (None: unknown)."""

WORTH_WORKERS = 16 << 20
"""Bytes of texts below which starting processes takes longer than they save."""
MOST_WORKERS = 32
_CHARACTERS_AT_ONCE = 1 << 20
"""Characters of text in a batch: a tokenizer takes some hundred bytes a token while it works."""
_DOCUMENTS_AT_ONCE = 1024


@dataclass(frozen=True)
class TokenBatch:
    """Some consecutive documents of a source."""

    documents: list[EncodedDocument]
    """Those that have a supervised token."""
    read: int
    """Documents whose end was read for it; a long text comes in several pieces."""
    following: Position | None
    """Where reading goes on; None: not in the middle of this record."""
    notes: Notes
    share: float | None
    """Share of the source's bytes that is read; None: unknown."""


def workers_of(setting: object, texts_bytes: int) -> int:
    """How many processes tokenise: `data.workers`, or with auto one a core where there is enough to do."""
    if setting != "auto":
        return int(setting)
    return min(len(os.sched_getaffinity(0)), MOST_WORKERS) if texts_bytes >= WORTH_WORKERS else 1


def tokenise(
    source: SourceFiles, encoder: DocumentEncoder, start: Position = BEGINNING, workers: int = 1
) -> Iterator[TokenBatch]:
    """Yield the source's batches from `start` on.

    Raises:
        UserError: see `read_items` and `DocumentEncoder`.
        RunError: a worker process died.
    """
    cutter = encoder.cutter
    batches = _batches(source, start, cutter)
    if workers <= 1:
        for batch in batches:
            yield _finished(batch, encoder.encode(batch.documents), source.key)
        return
    with _pool(encoder, workers) as pool:
        waiting: deque[tuple[_ReadBatch, Future]] = deque()
        try:
            for batch in batches:
                waiting.append((batch, pool.submit(_encode, batch.documents)))
                if len(waiting) > 2 * workers:
                    batch, future = waiting.popleft()
                    yield _finished(batch, future.result(), source.key)
            while waiting:
                batch, future = waiting.popleft()
                yield _finished(batch, future.result(), source.key)
        except BrokenProcessPool as error:
            raise RunError(
                f"{source.key}: a process that tokenises died (killed, perhaps for memory); what is finished is kept "
                f"where there is a cache; set data.workers to fewer than {workers}, and start again"
            ) from error


@dataclass(frozen=True)
class _ReadBatch:
    documents: list[Document]
    following: Position | None
    notes: Notes
    share: float | None


def _batches(source: SourceFiles, start: Position, cutter: TextCutter) -> Iterator[_ReadBatch]:
    """Batches that are small in documents and in characters of text."""
    notes = Notes()
    items: list[Item] = []
    size = 0
    for number in range(start[0], len(source.files)):
        place = start[1] if number == start[0] else (0, 0)
        for item in read_items(
            source.files[number], source.key, notes, source.form, source.text_documents, place, cutter
        ):
            items.append(item)
            size += len(item.document.text) if isinstance(item.document, Text) else 0
            if size >= _CHARACTERS_AT_ONCE or len(items) >= _DOCUMENTS_AT_ONCE:
                yield _read_batch(source, items, number, notes.drain())
                items, size = [], 0
    yield _read_batch(source, items, len(source.files), notes.drain())


def _read_batch(source: SourceFiles, items: list[Item], number: int, notes: Notes) -> _ReadBatch:
    if number == len(source.files):
        following: Position | None = (number, (0, 0))
    else:
        following = (number, items[-1].following) if items[-1].following is not None else None
    return _ReadBatch([item.document for item in items], following, notes, source.share(following))


def _finished(batch: _ReadBatch, encoded: list[EncodedDocument | RefusedRecord], key: str) -> TokenBatch:
    kept = []
    for document, tokens in zip(batch.documents, encoded, strict=True):
        if isinstance(tokens, RefusedRecord):
            note_refused(batch.notes, key, tokens)
            continue
        if is_prompt_alone(document):
            batch.notes.add(prompts_remark(key), document.where)
        if isinstance(document, PromptCompletion) and document.completion == "":
            batch.notes.add(f"{key}: {{count}} completions are empty (first: {{first}})", document.where)
        is_piece = isinstance(document, Text) and not (document.begins and document.ends)
        if is_piece or tokens.supervised[1:].any():
            kept.append(tokens)
        else:
            remark = f"{key}: {{count}} documents without a supervised token are left out (first: {{first}})"
            batch.notes.add(remark, document.where)
    ended = sum(not isinstance(document, Text) or document.ends for document in batch.documents)
    return TokenBatch(kept, ended, batch.following, batch.notes, batch.share)


_worker_encoder: DocumentEncoder | None = None


@contextmanager
def _pool(encoder: DocumentEncoder, workers: int) -> Iterator[Executor]:
    # Ranks hold threads and sockets that a fork would copy in any state; fresh processes have none.
    pool = ProcessPoolExecutor(
        workers,
        get_context("spawn"),
        _start_worker,
        (encoder.tokenizer, encoder.chat_template, encoder.template_arguments),
    )
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _start_worker(
    tokenizer: PreTrainedTokenizerBase, chat_template: str | None, template_arguments: dict[str, Any]
) -> None:
    global _worker_encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker_encoder = DocumentEncoder(tokenizer, chat_template, template_arguments)


def _encode(documents: list[Document]) -> list[EncodedDocument | RefusedRecord]:
    assert _worker_encoder is not None
    return _worker_encoder.encode(documents)
