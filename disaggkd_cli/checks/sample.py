"""A few short sequences of the user's own data: enough to prove something on, little enough for a minute."""

from __future__ import annotations

import numpy as np

from disaggkd_cli.data import IGNORE, Sequence, TokenizedDataset, sequence_indices

SAMPLE_TOKENS = (40, 28, 20, 12)
"""Tokens that the sampled sequences are cut to. They differ, so that a mean over micro-batches is not the mean over
tokens."""
_CANDIDATES = 16


def sample_sequences(dataset: TokenizedDataset, seed: int) -> list[Sequence]:
    """Return four sequences of the beginning of the training order, the shortest to be had, cut short.

    Each keeps at least one supervised token, and its prompt whole.
    """
    indices = sequence_indices(len(dataset), seed, 0, max(len(SAMPLE_TOKENS), min(_CANDIDATES, len(dataset))))
    sequences = [dataset.sequence(int(index)) for index in indices]
    sequences.sort(key=lambda sequence: _end(sequence, SAMPLE_TOKENS[0]))
    return [shortened(sequence, tokens) for sequence, tokens in zip(sequences, SAMPLE_TOKENS, strict=False)]


def shortened(sequence: Sequence, tokens: int) -> Sequence:
    """Return the first `tokens` tokens of a sequence, and more where nothing is supervised among those."""
    end = _end(sequence, tokens)
    lengths, filled = [], 0
    for length in sequence.document_lengths:
        if filled < end:
            lengths.append(min(length, end - filled))
            filled += lengths[-1]
    return Sequence(sequence.input_ids[:end], sequence.labels[:end], tuple(lengths))


def _end(sequence: Sequence, tokens: int) -> int:
    first = int(np.argmax(sequence.labels != IGNORE))
    return min(len(sequence), max(tokens, first + 1 + tokens // 2))


def dataset_of(sequences: list[Sequence]) -> TokenizedDataset:
    """Return a dataset that holds these sequences and nothing else."""
    lengths = [len(sequence.document_lengths) for sequence in sequences]
    return TokenizedDataset(
        input_ids=np.concatenate([sequence.input_ids for sequence in sequences]),
        labels=np.concatenate([sequence.labels for sequence in sequences]),
        sequence_ends=np.cumsum([len(sequence) for sequence in sequences]),
        document_lengths=np.concatenate([sequence.document_lengths for sequence in sequences]).astype(np.int32),
        documents_before=np.concatenate([[0], np.cumsum(lengths)]),
        supervised_counts=np.asarray([(sequence.labels != IGNORE).sum() for sequence in sequences], np.int32),
        fingerprint="sample",
        notes=[],
    )
