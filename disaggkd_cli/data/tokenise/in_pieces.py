"""Tokenise one text, a long one in pieces: a tokenizer's time grows faster than its text does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from disaggkd_cli.data.read.cutting import TextCutter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IDS_ONLY = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
"""How tokenizers are called for the ids of a text and nothing else."""


def ids_of(text: str, tokenizer: PreTrainedTokenizerBase, cutter: TextCutter) -> np.ndarray:
    """Return the token ids of `text`, [L] int32, without the special tokens that are added to a text."""
    ids = [tokenizer(piece, **IDS_ONLY)["input_ids"] for piece in cutter.pieces(text)]
    return np.concatenate([np.asarray(part, np.int32) for part in ids])


def ids_and_offsets_of(
    text: str, tokenizer: PreTrainedTokenizerBase, cutter: TextCutter
) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids of `text`, [L] int32, and the characters [begin, end) of each token, [L, 2] int64."""
    ids, offsets, start = [], [], 0
    for piece in cutter.pieces(text):
        tokens = tokenizer(piece, return_offsets_mapping=True, **IDS_ONLY)
        ids.append(np.asarray(tokens["input_ids"], np.int32))
        offsets.append(np.asarray(tokens["offset_mapping"], np.int64).reshape(-1, 2) + start)
        start += len(piece)
    return np.concatenate(ids), np.concatenate(offsets)
