"""What a run was trained with, key by key, and what it means when a resumed run is given something else.

The data, the tokenizer, the teacher's weights, the seed and the global batch are compared by content (see `resume`):
a change there is refused. All other keys may change between a checkpoint and the run that goes on from it. Those that
have a say in the weights are named in the log and in `status.json`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from disaggkd_cli.config import Config

SETTINGS = "settings"
"""Their name in the identity of a checkpoint."""
BY_CONTENT = "refused where the content differs"
COURSE = "training goes on with the new value, and so to other weights"
BITS = "the same training in another rounding: no longer bit-equal with the run as it was"
NOTHING = ""

MEANINGS: dict[str, str] = {
    "mode": BITS,
    "seed": BY_CONTENT,
    "run_dir": NOTHING,
    "teacher": BITS,
    "teacher.model": BY_CONTENT,
    "teacher.replicas": NOTHING,
    "teacher.trust_remote_code": NOTHING,
    "student": BITS,
    "student.model": BY_CONTENT,
    "student.from_teacher": BY_CONTENT,
    "student.from_config": BY_CONTENT,
    "student.lora": COURSE,
    "student.freeze": COURSE,
    "student.router_aux_weight": COURSE,
    "student.trust_remote_code": NOTHING,
    "loss": COURSE,
    "loss.implementation": BITS,
    "loss.memory_budget": BITS,
    "loss.vocabulary_parallel": BITS,
    "data": BY_CONTENT,
    "data.cache": NOTHING,
    "data.workers": NOTHING,
    "train": COURSE,
    "train.micro_batch_sequences": BITS,
    "train.accumulation": BITS,
    "train.eval_every": NOTHING,
    "train.save_every": NOTHING,
    "train.keep_checkpoints": NOTHING,
    "train.save_timeout": NOTHING,
    "train.on_save_error": NOTHING,
    "train.stop_at": NOTHING,
    "transport": NOTHING,
    "transport.dtype": BITS,
    "launch": NOTHING,
    "launch.threads": BITS,
    "launch.device": BITS,
    "on_policy": BY_CONTENT,
    "export": NOTHING,
    "log": NOTHING,
    "hardware": NOTHING,
}
"""By key, or by section for its keys without an entry of their own: what another value means for the weights. A student
by another name starts from the checkpoint all the same, if its shapes are the same. The mean over replicas of a
teacher, and where payloads travel, change no bit; another split of the global batch rounds otherwise."""


def settings_of(config: Config) -> dict[str, Any]:
    """Return every key that has a say in the weights, by its dotted name, as plain data."""
    return {key: value for key, value in _leaves(dataclasses.asdict(config), "") if meaning_of(key)}


def meaning_of(key: str) -> str:
    """Return what a change of `key` means for the weights; an empty text where it has no say in them."""
    while key not in MEANINGS:
        key = key.rpartition(".")[0]
    return MEANINGS[key]


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return one line for each setting that differs, with what that means. Keys that one side does not know are new
    ones at their defaults, or of another version, and are not compared."""
    return [
        f"{key} was {before[key]!r} and is {value!r} now: {meaning_of(key)}"
        for key, value in now.items()
        if key in before and before[key] != value and meaning_of(key) not in (NOTHING, BY_CONTENT)
    ]


def _leaves(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value and key not in _WHOLE:
            yield from _leaves(value, f"{key}.")
        else:
            yield key, list(value) if isinstance(value, tuple) else value


_WHOLE = {"data.train", "data.eval", "data.columns", "data.template_arguments"}
"""Mappings of the user's own, which are values and not sections."""
