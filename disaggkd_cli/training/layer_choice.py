"""Settle `student.from_teacher.layers: best_N` at the start of a run: chosen once, kept, the same on every rank.

The choice is a function of the teacher, its dtype and the first texts of the run. It is kept beside the run (so that
a resumed run has the layers that it began with) and in the cache of tokenised texts (so that the next run need not
choose again).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from disaggkd_cli import files
from disaggkd_cli.config import Config
from disaggkd_cli.config.layers import best_count, require_enough
from disaggkd_cli.data import MicroBatch, TrainingTexts, collate
from disaggkd_cli.data.keep.cache import Cache, default_directory
from disaggkd_cli.models import load_causal_lm, load_config, model_fingerprint, teacher_source
from disaggkd_cli.models.choose_layers import best_layers
from disaggkd_cli.models.load import DTYPES
from disaggkd_cli.training.run_directory import RunDirectory

TOKENS = 512
"""Tokens of the run's texts that layers are chosen on; more tokens cost time and change few choices."""
_VERSION = 1


def settle_layers(config: Config, train: TrainingTexts, directory: Path, log: Callable[[str], None]) -> None:
    """Put the chosen layers in the place of `best_N` in `config`. Collective over all student ranks.

    Args:
        config: the run; nothing happens where it names no `best_N`.
        train: the texts.
        directory: the run's, where an earlier start has left `layers.json`, or this one leaves it.
        log: takes a line a removed layer, on rank 0.

    Raises:
        UserError: the teacher has fewer layers, or cannot be shortened so.
    """
    section = config.student.from_teacher
    best = None if section is None else best_count(section.layers)
    if best is None:
        return
    source = teacher_source(config)
    count = load_config(source, "teacher.model").get_text_config().num_hidden_layers
    require_enough(best, count)
    chosen = torch.zeros(best, dtype=torch.int64)
    if dist.get_rank() == 0:
        chosen = torch.tensor(_chosen(config, source, best, train, RunDirectory(directory).layers, log))
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu"
    settled = chosen.to(device)
    dist.broadcast(settled, src=0)
    section.layers = settled.tolist()
    log(f"student.from_teacher.layers=best_{best} is {section.layers}")


def recorded_layers(directory: Path) -> list[int] | None:
    """Return the layers that a run in `directory` settled on, or None where it has none on record."""
    try:
        return json.loads(RunDirectory(directory).layers.read_text(encoding="utf-8"))["layers"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _chosen(
    config: Config, source: Any, best: int, train: TrainingTexts, kept: Path, log: Callable[[str], None]
) -> list[int]:
    batches = _first_texts(config, train)
    facts = {
        "version": _VERSION,
        "teacher": model_fingerprint(source),
        "dtype": config.teacher.dtype,
        "layers": best,
        "texts": [batch.input_ids.flatten().tolist() for batch in batches],
        "rows": [batch.rows.tolist() for batch in batches],
    }
    found = _read(kept, facts)
    if found is None:
        cache = _cache(config)
        entry = None if cache is None else cache.entry("layers", facts).with_suffix(".json")
        found = None if entry is None else _read(entry, facts)
        if found is None:
            tokens = sum(batch.input_ids.numel() for batch in batches)
            log(f"choosing the {best} layers whose loss hurts most, on {tokens} tokens of data.train")
            teacher = load_causal_lm(source, DTYPES[config.teacher.dtype], "teacher.model").eval()
            found = best_layers(teacher, batches, best, log)
            if entry is not None:
                _write(entry, facts, found)
    _write(kept, facts, found)
    return found


def _first_texts(config: Config, train: TrainingTexts) -> list[MicroBatch]:
    """Return the run's first sequences, one a batch, as many as hold TOKENS tokens."""
    batch = next(iter(train.batches(config.seed, config.global_batch_sequences, 0)))
    batches: list[MicroBatch] = []
    tokens = 0
    for sequence in batch.sequences(0, config.global_batch_sequences):
        batches.append(collate([sequence], pad_id=0))
        tokens += len(sequence)
        if tokens >= TOKENS:
            break
    return batches


def _cache(config: Config) -> Cache | None:
    if config.data.cache is None:
        return None
    return Cache(default_directory() if config.data.cache == "auto" else Path(config.data.cache).expanduser())


def _read(path: Path, facts: dict[str, Any]) -> list[int] | None:
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
        return recorded["layers"] if recorded["chosen_by"] == facts else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, facts: dict[str, Any], layers: list[int]) -> None:
    files.write_text(path, json.dumps({"layers": layers, "chosen_by": facts}))
