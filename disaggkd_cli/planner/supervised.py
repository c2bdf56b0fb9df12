"""Which share of the tokens is trained on: from a key, or from the first records of the training data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from disaggkd_cli.config.texts import DataConfig
from disaggkd_cli.errors import UserError

_RECORDS = 256
_ANSWERS = ("completion", "response", "output", "answer", "chosen")
_PROMPTS = ("prompt", "instruction", "question", "input")


def supervised_share(wanted: Any, data: DataConfig) -> float:
    """Return the share of supervised tokens.

    Args:
        wanted: `hardware.supervised_share`: a number, or auto.
        data: the texts. Characters of answers over those of prompts and answers, in the first records of local JSON
            lines, stand for tokens; 1 for plain texts and for whatever is not here.

    Raises:
        UserError: a share outside of 0 to 1.
    """
    if wanted != "auto":
        if isinstance(wanted, bool) or not isinstance(wanted, (int, float)) or not 0 < wanted <= 1:
            raise UserError(f"hardware.supervised_share: {wanted!r} must be auto, or a number above 0 and at most 1")
        return float(wanted)
    path = Path(data.train).expanduser() if isinstance(data.train, str) else None
    if path is None or path.suffix not in (".jsonl", ".json") or not path.is_file() or data.records == "text":
        return 1.0
    answers = everything = 0
    for record in _records(path):
        answer, whole = _lengths(record)
        answers, everything = answers + answer, everything + whole
    return answers / everything if answers and everything else 1.0


def _records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8") as lines:
            for _, line in zip(range(_RECORDS), lines, strict=False):
                record = json.loads(line)
                if isinstance(record, dict):
                    yield record
    except (OSError, ValueError):
        return


def _lengths(record: dict[str, Any]) -> tuple[int, int]:
    """Characters that are trained on, and all; a text without roles is trained on whole."""
    messages = record.get("messages") or record.get("conversations")
    if not messages and any(isinstance(record.get(name), list) for name in (*_PROMPTS, *_ANSWERS)):
        messages = [one for name in (*_PROMPTS, *_ANSWERS) for one in record.get(name) or [] if isinstance(one, dict)]
    if isinstance(messages, list) and messages:
        sizes = [(one.get("role") or one.get("from"), len(_text(one))) for one in messages if isinstance(one, dict)]
        return sum(size for role, size in sizes if role in ("assistant", "gpt", "model")), sum(s for _, s in sizes)
    answer = next((len(record[name]) for name in _ANSWERS if isinstance(record.get(name), str)), 0)
    prompt = sum(len(record[name]) for name in _PROMPTS if isinstance(record.get(name), str))
    if prompt and answer:
        return answer, prompt + answer
    text = len(str(record.get("text") or ""))
    return text, text


def _text(message: dict[str, Any]) -> str:
    content = message.get("content", message.get("value"))
    return content if isinstance(content, str) else json.dumps(content)
