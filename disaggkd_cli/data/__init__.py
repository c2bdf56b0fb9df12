"""Documents in, token batches with labels out: readers, masks, packing, splits, and a deterministic order."""

from disaggkd_cli.data.layout.dataset import TokenizedDataset
from disaggkd_cli.data.layout.micro_batch import (
    IGNORE,
    MicroBatch,
    Sequence,
    collate,
    empty_micro_batch,
    flatten_lengths,
    lengths_by_row,
    position_ids_from_lengths,
    to_device,
)
from disaggkd_cli.data.look import look_at_texts
from disaggkd_cli.data.order.bucketing import PAD_MULTIPLE, padded_tokens
from disaggkd_cli.data.order.positions import StreamOrder
from disaggkd_cli.data.order.shuffle import sequence_indices
from disaggkd_cli.data.order.training_texts import GlobalBatch, TrainingTexts
from disaggkd_cli.data.reading_progress import TextsProgress
from disaggkd_cli.data.splits import Splits, load_splits
from disaggkd_cli.data.tokenise.vocabulary import (
    compare_vocabularies,
    load_tokenizer,
    padding_id,
    tokenizer_fingerprint,
)

__all__ = [
    "IGNORE",
    "PAD_MULTIPLE",
    "GlobalBatch",
    "MicroBatch",
    "Sequence",
    "Splits",
    "StreamOrder",
    "TextsProgress",
    "TokenizedDataset",
    "TrainingTexts",
    "collate",
    "compare_vocabularies",
    "empty_micro_batch",
    "flatten_lengths",
    "lengths_by_row",
    "load_splits",
    "load_tokenizer",
    "look_at_texts",
    "padded_tokens",
    "position_ids_from_lengths",
    "sequence_indices",
    "padding_id",
    "to_device",
    "tokenizer_fingerprint",
]
