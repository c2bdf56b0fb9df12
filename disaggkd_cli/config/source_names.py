"""How `data.train` and `data.eval` name their sources."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

BUILTIN_DATA = ("builtin:pydoc",)
SOURCE_KEYS = ("path", "weight", "format", "records", "text_documents", "columns", "split", "config")
HELD_OUT_SPLIT = "split"
"""The value of `data.eval` that takes the held-out split beside the training texts."""
RECORD_FIELDS = (
    "text",
    "prompt",
    "completion",
    "messages",
    "conversations",
    "instruction",
    "output",
    "input",
    "system",
    "history",
    "tools",
    "chat_template_kwargs",
)
"""Fields that records may have; `data.columns` says what the data call them."""
FILE_FORMATS: dict[str, tuple[str, ...]] = {
    "text": (".txt", ".text"),
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "csv": (".csv", ".tsv"),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
}
"""What a file may hold, and the endings that say so. How each is read: `data.read.readers.READERS`."""
DATA_FORMATS = ("auto", *FILE_FORMATS, "dataset", "hub")
"""What `data.format` may say."""
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_ENDINGS = (*(ending for endings in FILE_FORMATS.values() for ending in endings), ".gz", ".zst", ".bz2")


def is_hub_name(value: str) -> bool:
    """Whether a value that is no file here may be the name of a data set on the Hub, OWNER/NAME."""
    path = Path(value)
    return bool(_HUB_NAME.fullmatch(value)) and not value.endswith(_ENDINGS) and not path.parent.exists()


def entries_of(value: Any) -> list[tuple[Any, Any]]:
    """(name, entry) of each source of a list or a mapping; a mapping with a `path` of text is one source, named ""."""
    if isinstance(value, dict):
        if isinstance(value.get("path"), str):
            return [("", value)]
        return list(value.items())
    return list(enumerate(value, 1)) if isinstance(value, list) else []
