"""A look at the texts before a run: open the first records of each source, and say what they are."""

from __future__ import annotations

from itertools import islice
from typing import Any

from disaggkd_cli.data.notes import Notes
from disaggkd_cli.data.read.compressed import opened
from disaggkd_cli.data.read.documents import Conversation, Document, PromptCompletion
from disaggkd_cli.data.read.hub import hub_splits
from disaggkd_cli.data.read.lines import decoded
from disaggkd_cli.data.read.readers import read_documents
from disaggkd_cli.data.read.source_files import SourceFiles
from disaggkd_cli.data.splits import named_sources
from disaggkd_cli.errors import UserError

RECORDS = 5
"""Records of each source that are opened."""
_TEXT_BYTES = 1 << 16


def look_at_texts(data_config: Any, prompts: bool = False) -> list[str]:
    """What the first records of each source of the `data` section are, a line a source, and what was noticed.

    No tokenizer is asked, and of a data set on the Hub only the names of its splits. `prompts` as in `load_splits`.

    Raises:
        UserError: a source is not there, or its first records can't be read as they are asked to be.
    """
    notes = Notes()
    train, evaluation = named_sources(data_config, notes, prompts)
    sources = [*train, *(evaluation if isinstance(evaluation, list) else [])]
    lines = [_look(source, notes) for source in sources]
    return [*lines, *notes.lines()]


def _look(source: SourceFiles, notes: Notes) -> str:
    first, others = source.files[0], len(source.files) - 1
    where = f"{source.key}: {first.path}" + (f" and {others} more" if others else "")
    if first.format == "hub":
        names = hub_splits(str(first.path), first.config, source.key)
        if first.split not in names:
            raise UserError(f"{source.key}: {first.path} has no split {first.split}; it has {', '.join(names)}")
        return f"{where}, a data set on the Hub with the split {first.split}"
    if first.format == "text":
        with opened(first.path, source.key) as file:
            # A letter may be cut at the end.
            text = decoded(file.read(_TEXT_BYTES).rpartition(b"\n")[0], str(first.path), 1)
        return f"{where} (text): begins with {text.strip()[:40]!r}"
    documents = list(islice(read_documents(first, source.key, notes, source.form, source.text_documents), RECORDS))
    kinds = ", ".join(dict.fromkeys(map(_kind, documents)))
    return f"{where} ({first.format}): the first {len(documents)} records are {kinds}"


def _kind(document: Document) -> str:
    if isinstance(document, Conversation):
        return "conversations to be answered" if document.is_prompt else "conversations"
    if isinstance(document, PromptCompletion):
        return "prompts to be completed" if document.completion is None else "prompts with completions"
    return "texts"
