"""Documents in, token batches with labels out: readers, masks, packing, splits, and a deterministic order."""

from disaggkd_cli.data.batch import (
    IGNORE,
    MicroBatch,
    Sequence,
    collate,
    empty_micro_batch,
    flatten_lengths,
    lengths_by_row,
    position_ids_from_lengths,
)
from disaggkd_cli.data.dataset import TokenizedDataset
from disaggkd_cli.data.load import Splits, load_splits
from disaggkd_cli.data.order import sequence_indices
from disaggkd_cli.data.tokenizer import compare_vocabularies, load_tokenizer, tokenizer_fingerprint

__all__ = [
    "IGNORE",
    "MicroBatch",
    "Sequence",
    "Splits",
    "TokenizedDataset",
    "collate",
    "compare_vocabularies",
    "empty_micro_batch",
    "flatten_lengths",
    "lengths_by_row",
    "load_splits",
    "load_tokenizer",
    "position_ids_from_lengths",
    "sequence_indices",
    "tokenizer_fingerprint",
]
