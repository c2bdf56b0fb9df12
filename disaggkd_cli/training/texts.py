"""Read a run's texts, saying how far it is, what was noticed, and what mixing and batching by length come to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from disaggkd_cli.config import Config
from disaggkd_cli.config.on_policy import student_writes_all
from disaggkd_cli.data import (
    PAD_MULTIPLE,
    Splits,
    StreamOrder,
    TextsProgress,
    TokenizedDataset,
    load_splits,
    padded_tokens,
)

_LOOKED_AT = 1 << 20
"""Sequences at the stream's beginning by which shares and padding are told."""


def read_texts(config: Config, tokenizer: Any, pack: bool, log: Callable[[str], None]) -> Splits:
    """Return the sequences to train on and those held out.

    Raises:
        UserError, RunError: see `load_splits`.
    """
    leader = not dist.is_initialized() or dist.get_rank() == 0
    with TextsProgress(log, bar=leader) as progress:
        splits = load_splits(
            config.data, tokenizer, pack=pack, seed=config.seed, progress=progress, prompts=student_writes_all(config)
        )
    splits.train.remember_in(Path(config.run_dir), write=leader)
    for dataset in (splits.train, splits.evaluation):
        for note in dataset.notes:
            log(note)
    if (train := splits.train.whole) is not None:
        for line in (*shares(config, train), *padding(config, train)):
            log(line)
    return splits


def shares(config: Config, train: TokenizedDataset) -> Iterator[str]:
    """Yield what each source contributes to the run."""
    if not train.weights:
        return
    indices = _beginning(config, train)
    number = config.train.steps * config.global_batch_sequences
    tokens = train.lengths[indices]
    ends = np.cumsum(train.source_sizes)
    for source, (weight, size, end) in enumerate(zip(train.weights, train.source_sizes, ends.tolist(), strict=True)):
        of_source = (indices >= end - size) & (indices < end)
        yield (
            f"data.train[{train.names[source]}]: weight {weight} of {sum(train.weights)}, {of_source.mean():.1%} of "
            f"sequences and {tokens[of_source].sum() / tokens.sum():.1%} of tokens; its {size:,} sequences come "
            f"{number * weight / sum(train.weights) / size:.2f} times in {config.train.steps} steps"
        )


def padding(config: Config, train: TokenizedDataset) -> Iterator[str]:
    """Yield what batches by length save."""
    if not train.length_bucketing:
        return
    rows, limit = config.train.micro_batch_sequences, config.data.sequence_length
    lengths = train.lengths
    by_length = lengths[_beginning(config, train)]
    shuffled = lengths[_beginning(config, train, bucketed=False)]
    tokens = int(by_length.sum())
    before = padded_tokens(shuffled, rows, 1, limit)
    after = padded_tokens(by_length, rows, PAD_MULTIPLE, limit)
    yield (
        f"batches hold sequences of similar lengths: {after / tokens - 1:.1%} padding where {before / tokens - 1:.1%} "
        f"would be padded in plain order ({tokens:,} tokens of {len(by_length):,} sequences; {after:,} positions "
        f"against {before:,})"
    )


def _beginning(config: Config, train: TokenizedDataset, bucketed: bool | None = None) -> np.ndarray:
    size = config.global_batch_sequences
    number = min(config.train.steps * size, max(_LOOKED_AT, size))
    return StreamOrder(train, config.seed, size, bucketed).indices(0, number)
