"""The section `data`: the texts, and how they become sequences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class DataConfig:
    """The texts."""

    train: Any = ""
    """A file, a directory, a glob, a data set on the Hub (OWNER/NAME), or `builtin:pydoc` (reference prose of Python's
    standard library). Required. Or `{path: …, split: …, config: …}`, or several: a list (or a mapping by name) of
    `{path: …, weight: 3}`, drawn from in proportion to their weights, counted in sequences; each may have a format,
    records, text_documents and columns of its own. Files and folders named test or validation are never trained on
    beside others."""

    eval: Any = 0.02
    """Held-out texts: a path like `train`; `split`, the validation or test split beside the training texts; or the
    fraction of the training documents to hold out."""

    format: str = "auto"
    """auto, text, jsonl (or one JSON array), csv, parquet, arrow, dataset (a directory of `datasets`), or hub."""

    sequence_length: int = 512
    """Longest sequence in tokens; packed sequences have just this length."""

    packing: str = "auto"
    """auto packs several documents into a row where the models keep them apart; on insists, off never packs."""

    long_documents: str = "auto"
    """A document longer than sequence_length: split (goes on in the next sequence), drop (counted and logged), error.
    auto splits text; prompts and chats are dropped up to one in twenty, with a warning, and refused above that."""

    records: str = "auto"
    """Which fields of a record count: text, prompt_completion, messages, sharegpt (conversations), alpaca (instruction,
    input, output); auto takes those that are there."""

    columns: Any = field(default_factory=dict)
    """What the data call the fields of a record, for instance `{prompt: question, completion: answer}`."""

    text_documents: str = "file"
    """What one document of a plain text file is: the whole file, or its sections between blank lines."""

    chat_template: str | None = None
    """A file with the chat template (Jinja) to use instead of the tokenizer's own."""

    template_arguments: Any = field(default_factory=dict)
    """The chat template's own variables, for instance `{enable_thinking: false}`."""

    eval_sequences: int | None = None
    """Evaluate on at most this many held-out sequences; null means all of them."""

    length_bucketing: bool = True
    """Where documents are not packed: make batches of documents of similar lengths, so that less is padded."""

    cache: str | None = "auto"
    """Directory that keeps tokenised texts for other ranks and later runs. auto: $XDG_CACHE_HOME/disaggkd or
    ~/.cache/disaggkd, for texts of 8 MiB and more; null: keep nothing, each rank holds all tokens in memory."""

    workers: Any = "auto"
    """Processes that tokenise; auto: one per core, for texts of 16 MiB and more."""

    streaming: bool = False
    """Tokenise while training and keep nothing: for texts too large for the disk. data.eval must then be a path."""

    shuffle_tokens: int = 4194304
    """With streaming: sequences are shuffled among about so many tokens that follow one another in the texts."""
