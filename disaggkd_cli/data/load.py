"""From the `data` section of a config and a tokenizer to sequences for training and for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from disaggkd_cli.data.dataset import TokenizedDataset, lay_out
from disaggkd_cli.data.documents import RECORD_KINDS, Document, PromptCompletion, Text
from disaggkd_cli.data.encoding import DocumentEncoder, EncodedDocument
from disaggkd_cli.data.notes import Notes
from disaggkd_cli.data.packing import LONG_DOCUMENTS
from disaggkd_cli.data.readers import TEXT_DOCUMENTS, read_documents
from disaggkd_cli.data.sources import Source, find_sources
from disaggkd_cli.data.split import hold_out
from disaggkd_cli.data.tokenized import TokenizedDocuments, join
from disaggkd_cli.data.tokenizer import tokenizer_fingerprint
from disaggkd_cli.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Progress = Callable[[str, int], None]
"""Called with what is being done and how many documents are done."""

_CHARACTERS_AT_ONCE = 4_000_000
_DOCUMENTS_AT_ONCE = 1024
_DROPPED_UNASKED = 0.05


@dataclass(frozen=True, eq=False)
class Splits:
    """The sequences to train on and those held out; no document is in both."""

    train: TokenizedDataset
    evaluation: TokenizedDataset


def load_splits(
    data_config: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    pack: bool,
    seed: int,
    progress: Progress | None = None,
) -> Splits:
    """Read, tokenise, split and lay out the data.

    Args:
        data_config: the `data` section: train, eval, format, sequence_length, long_documents, records, text_documents,
            chat_template (the last four may be missing).
        tokenizer: a transformers tokenizer.
        pack: several documents in a row (only where the model keeps them apart), or one.
        seed: decides which documents are held out.
        progress: see `Progress`.

    Raises:
        UserError: anything about the files or the settings that the user must mend.
    """
    settings = _settings(data_config)
    encoder = DocumentEncoder(tokenizer, _chat_template(getattr(data_config, "chat_template", None)))
    train_notes, evaluation_notes = Notes(), Notes()
    train_sources = find_sources(str(data_config.train), "data.train", settings["format"], train_notes)
    if isinstance(data_config.eval, str):
        sources = find_sources(data_config.eval, "data.eval", settings["format"], evaluation_notes)
        _refuse_overlap(train_sources, sources)
        train = _tokenize(train_sources, "data.train", encoder, settings, train_notes, progress)
        evaluation = _tokenize(sources, "data.eval", encoder, settings, evaluation_notes, progress)
    else:
        both = _tokenize(train_sources, "data.train", encoder, settings, train_notes, progress)
        train, evaluation = hold_out(both, float(data_config.eval), seed, evaluation_notes)
    settings |= {"pack": pack, "tokenizer": tokenizer_fingerprint(tokenizer)}
    return Splits(
        lay_out([train], "data.train", settings, train_notes),
        lay_out([evaluation], "data.eval", settings, evaluation_notes, shuffle_seed=seed),
    )


def _settings(data_config: Any) -> dict[str, Any]:
    """The settings that decide what sequences come out, checked."""
    choices = {"long_documents": LONG_DOCUMENTS, "records": RECORD_KINDS, "text_documents": TEXT_DOCUMENTS}
    settings = {key: getattr(data_config, key, allowed[0]) for key, allowed in choices.items()}
    for key, allowed in choices.items():
        if settings[key] not in allowed:
            raise UserError(f"data.{key}: {settings[key]} is none of {', '.join(allowed)}")
    if data_config.sequence_length < 2:
        raise UserError(f"data.sequence_length: {data_config.sequence_length} leaves no next token; at least 2")
    return settings | {"sequence_length": int(data_config.sequence_length), "format": data_config.format}


def _chat_template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.chat_template: {path} can't be read ({error})") from error


def _refuse_overlap(train: list[Source], evaluation: list[Source]) -> None:
    seen = {source.path.resolve() for source in train}
    for source in evaluation:
        if source.path.resolve() in seen:
            raise UserError(
                f"data.eval: {source.path} is trained on as well (data.train); name another file, or a fraction (0.02)"
            )


def _tokenize(
    sources: list[Source],
    key: str,
    encoder: DocumentEncoder,
    settings: dict[str, Any],
    notes: Notes,
    progress: Progress | None,
) -> TokenizedDocuments:
    """All documents of the sources that have a supervised token and fit (or are made to)."""

    def documents() -> Iterator[Document]:
        for source in sources:
            yield from read_documents(source, key, notes, settings["records"], settings["text_documents"])

    def encoded() -> Iterator[EncodedDocument]:
        done = 0
        for batch in _batches(documents()):
            for document, tokens in zip(batch, encoder.encode(batch), strict=True):
                if isinstance(document, PromptCompletion) and not document.completion:
                    notes.add(f"{key}: {{count}} completions are empty (first: {{first}})", document.where)
                if tokens.supervised[1:].any():
                    yield tokens
                else:
                    remark = f"{key}: {{count}} documents without a supervised token are left out (first: {{first}})"
                    notes.add(remark, document.where)
            done += len(batch)
            if progress:
                progress(f"tokenising {key}", done)

    found = join(encoded())
    if not len(found):
        raise UserError(
            f"{key}: no document of {sources[0].path} has a supervised token: texts need two tokens, "
            "prompts a completion, conversations an assistant's turn"
        )
    return _drop_long(found, key, settings, notes)


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Batches that are small in documents and in characters of text."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text) if isinstance(document, Text) else 0
        if size >= _CHARACTERS_AT_ONCE or len(batch) >= _DOCUMENTS_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _drop_long(documents: TokenizedDocuments, key: str, settings: dict[str, Any], notes: Notes) -> TokenizedDocuments:
    """Apply `data.long_documents` to what is longer than a sequence. What is kept of it is cut when it is laid out.

    "auto" keeps running text, which can be cut without loss, and drops prompts with answers, whose later parts would
    lack their prompts, as long as they are few.
    """
    length, policy = settings["sequence_length"], settings["long_documents"]
    long = documents.lengths > length
    if not long.any():
        return documents
    what = (
        f"{key}: {long.sum()} of {len(documents)} documents are longer than data.sequence_length={length} "
        f"(longest: {documents.lengths.max()} tokens)"
    )
    if policy == "error":
        raise UserError(f"{what}; raise data.sequence_length, or set data.long_documents to split or drop")
    dropped = {"drop": long, "auto": long & ~documents.is_text, "split": np.zeros_like(long)}[policy]
    share = dropped.sum() / len(documents)
    if policy == "auto" and share > _DROPPED_UNASKED:
        raise UserError(
            f"{what}, and {dropped.sum()} of them are prompts with answers, which can't be cut without parting the "
            "answer from its prompt. Raise data.sequence_length, or set data.long_documents to drop or split"
        )
    if dropped.all():
        raise UserError(f"{what}: none is left (data.long_documents={policy}); raise data.sequence_length")
    cut = long & ~dropped
    if cut.any():
        pairs = (cut & ~documents.is_text).sum()
        warning = f"; {pairs} of them are prompts with answers, whose later parts lack their prompts" if pairs else ""
        notes.add(f"{what}: {cut.sum()} go on in the next sequence{warning}")
    if dropped.any():
        notes.add(f"{what}: WARNING, {dropped.sum()} of them ({share:.1%} of all) are LEFT OUT")
    return documents.select(~dropped)
