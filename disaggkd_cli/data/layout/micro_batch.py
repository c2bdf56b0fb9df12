"""What one forward pass eats: token ids, where documents begin, and the labels that count.

Legend of shapes: B rows of a micro-batch, S positions of a row, R supervised rows (token positions whose label counts),
N documents of the micro-batch. Labels are next-token labels, already shifted: `labels[b, i]` is the token that follows
`input_ids[b, i]` in its document, or -100 where nothing is to be predicted.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

IGNORE = -100
"""The label of a token position that does not count."""


@dataclass(frozen=True, eq=False)
class Sequence:
    """One row before it is padded: one document, or several packed one after the other."""

    input_ids: np.ndarray
    """[L] int32 token ids."""
    labels: np.ndarray
    """[L] int32 next-token labels; -100 = not supervised, as at each document's last token. Where a text was cut, the
    row's last label is the token that follows in the text, though it stands in another row."""
    document_lengths: tuple[int, ...]
    """Tokens of each document of the row; sums to L."""
    written: bool = False
    """Whether the student wrote it, so that its labels are nobody's data."""

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Rows padded on the right to the longest of them.

    No attention mask exists anywhere: attention is causal, and padding goes on where the row's last document ends and
    is never supervised, so it can change nothing. Were it a document of its own, positions would start again at it, and
    transformers would take each padded batch for a packed one: a mask of [S, S] for each row instead of causal kernels.
    """

    input_ids: Tensor
    """[B, S] int64."""
    document_lengths: tuple[tuple[int, ...], ...]
    """Tokens of each document, row by row; every row sums to S, its last document being longer by the row's padding."""
    labels: Tensor
    """[B, S] int64 next-token labels (already shifted); -100 = not supervised."""
    row_lengths: tuple[int, ...] | None = None
    """Tokens of each row before its padding; None where no row is padded."""
    written: tuple[bool, ...] = ()
    """Of each row, whether the student wrote it; empty where it wrote none."""

    @cached_property
    def token_mask(self) -> Tensor:
        """[B, S] bool: False at padding. Attention needs none; whoever counts tokens does."""
        if self.row_lengths is None:
            return torch.ones_like(self.input_ids, dtype=torch.bool)
        ends = torch.tensor(self.row_lengths, device=self.input_ids.device)
        return torch.arange(self.input_ids.shape[1], device=self.input_ids.device) < ends[:, None]

    @cached_property
    def position_ids(self) -> Tensor:
        """[B, S] int64, starting again from zero with each document."""
        return position_ids_from_lengths(self.document_lengths).to(self.input_ids.device)

    @cached_property
    def rows(self) -> Tensor:
        """[R] int64: the supervised positions, as ascending indices into the flattened B * S."""
        return torch.nonzero(self.labels.reshape(-1) != IGNORE).reshape(-1)

    @cached_property
    def row_labels(self) -> Tensor:
        """[R] int64: the labels of `rows`, in their order."""
        return self.labels.reshape(-1)[self.rows]

    @cached_property
    def written_rows(self) -> Tensor:
        """[W] int64: which of `rows`, by their number, stand in what the student wrote."""
        return torch.nonzero(self._is_written).reshape(-1)

    @cached_property
    def given_rows(self) -> Tensor:
        """[R - W] int64: which of `rows`, by their number, stand in the data's own sequences."""
        return torch.nonzero(~self._is_written).reshape(-1)

    @property
    def _is_written(self) -> Tensor:
        if not self.written:
            return torch.zeros(len(self.rows), dtype=torch.bool)
        return torch.tensor(self.written)[self.rows.cpu() // self.input_ids.shape[1]]

    @cached_property
    def largest_label(self) -> int:
        """The largest id among `row_labels`, -1 without any."""
        return int(self.row_labels.max()) if len(self.rows) else -1

    @property
    def supervised_count(self) -> int:
        """R, the number of supervised rows."""
        return self.rows.numel()

    @property
    def flat_document_lengths(self) -> Tensor:
        """[N] int32 lengths of all documents, row by row: the form that travels."""
        return flatten_lengths(self.document_lengths)

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same micro-batch with its tensors on `device`, in one copy that nobody waits for.

        What follows from labels and lengths is found here, where the micro-batch was made, and carried: to find it
        there, a GPU would have to be waited for.
        """
        device = torch.device(device)
        if device == self.input_ids.device:
            return self
        names = ["input_ids", "labels", "position_ids", "rows", "row_labels"]
        names += ["written_rows", "given_rows"] if self.written else []
        tensors = [getattr(self, name) for name in names]
        flat = to_device(torch.cat([tensor.reshape(-1) for tensor in tensors]), device)
        parts = flat.split([tensor.numel() for tensor in tensors])
        there = {name: part.view(tensor.shape) for name, part, tensor in zip(names, parts, tensors, strict=True)}
        moved = MicroBatch(there["input_ids"], self.document_lengths, there["labels"], self.row_lengths, self.written)
        found = {name: there[name] for name in names[2:]}
        if self.row_lengths is not None:
            found["token_mask"] = to_device(self.token_mask, device)
        # Where `cached_property` looks for what is already known.
        moved.__dict__.update(found, largest_label=self.largest_label)
        return moved


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on `device`; to a GPU it goes from pinned memory, so that the host need not wait for it."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def flatten_lengths(document_lengths: SequenceOf[SequenceOf[int]]) -> Tensor:
    """[N] int32 from nested lengths, row by row. `lengths_by_row` is the way back."""
    return torch.tensor([length for row in document_lengths for length in row], dtype=torch.int32)


def lengths_by_row(flat_lengths: Tensor | SequenceOf[int], sequence_length: int) -> tuple[tuple[int, ...], ...]:
    """Nested lengths from flat ones: a row ends where its documents sum to `sequence_length`.

    Raises:
        ValueError: a document is not positive, or the lengths do not fill whole rows.
    """
    rows: list[tuple[int, ...]] = []
    row: list[int] = []
    filled = 0
    for length in (int(length) for length in flat_lengths):
        row.append(length)
        filled += length
        if length <= 0 or filled > sequence_length:
            raise ValueError(f"document lengths {row} do not fill a row of {sequence_length} positions")
        if filled == sequence_length:
            rows.append(tuple(row))
            row, filled = [], 0
    if row:
        raise ValueError(f"the last row holds {filled} of {sequence_length} positions")
    return tuple(rows)


def position_ids_from_lengths(
    document_lengths: SequenceOf[SequenceOf[int]] | Tensor, sequence_length: int | None = None
) -> Tensor:
    """[B, S] int64 position ids that start again from zero with each document.

    Args:
        document_lengths: nested lengths, row by row, or the flat [N] tensor that travels.
        sequence_length: S; needed with the flat form, checked with the nested one.

    Raises:
        ValueError: a document is not positive, or the lengths do not fill whole rows of S.
    """
    if isinstance(document_lengths, Tensor):
        if sequence_length is None:
            raise ValueError("flat document lengths need the sequence length")
        flat = document_lengths.cpu().long()
        rows = lengths_by_row(flat.tolist(), sequence_length)
    else:
        if sequence_length is None:
            sequence_length = sum(document_lengths[0]) if document_lengths else 0
        flat = flatten_lengths(document_lengths).long()
        rows = lengths_by_row(flat.tolist(), sequence_length)
        if rows != tuple(map(tuple, document_lengths)):
            raise ValueError(f"not every row of document lengths sums to {sequence_length}: {document_lengths}")
    starts = torch.cumsum(flat, 0) - flat
    positions = torch.arange(len(rows) * sequence_length) - torch.repeat_interleave(starts, flat)
    return positions.reshape(len(rows), sequence_length)


def collate(sequences: SequenceOf[Sequence], pad_id: int, multiple: int = 1, limit: int | None = None) -> MicroBatch:
    """Pad `sequences` on the right to the longest of them, or a little further.

    Args:
        sequences: at least one, each with at least one token.
        pad_id: any id of the vocabulary; it may be the end token's, since padding is found by length and not by id.
        multiple: round the longest up to a multiple of it,
        limit: but not above this.
    """
    if not sequences or any(len(sequence) == 0 for sequence in sequences):
        raise ValueError("a micro-batch needs at least one sequence, and each at least one token")
    longest = max(len(sequence) for sequence in sequences)
    rounded = -(-longest // multiple) * multiple
    longest = max(longest, rounded if limit is None else min(rounded, limit))
    input_ids = np.full((len(sequences), longest), pad_id, dtype=np.int64)
    labels = np.full((len(sequences), longest), IGNORE, dtype=np.int64)
    document_lengths = []
    for row, sequence in enumerate(sequences):
        if sum(sequence.document_lengths) != len(sequence):
            raise ValueError(f"documents of {sequence.document_lengths} tokens in a sequence of {len(sequence)}")
        input_ids[row, : len(sequence)] = sequence.input_ids
        labels[row, : len(sequence)] = sequence.labels
        *others, last = sequence.document_lengths
        document_lengths.append((*others, last + longest - len(sequence)))
    written = tuple(sequence.written for sequence in sequences)
    batch = MicroBatch(
        torch.from_numpy(input_ids),
        tuple(document_lengths),
        torch.from_numpy(labels),
        tuple(map(len, sequences)),
        written if any(written) else (),
    )
    batch.largest_label  # noqa: B018  finds the supervised rows and their labels here, once, on the CPU
    return batch


def empty_micro_batch(batch_size: int, sequence_length: int, pad_id: int) -> MicroBatch:
    """Only padding, nothing supervised: what a rank steps through when it has nothing left but its peers do.

    Every row is one document of `sequence_length` (at least 1) padding tokens.
    """
    return MicroBatch(
        torch.full((batch_size, sequence_length), pad_id, dtype=torch.int64),
        ((sequence_length,),) * batch_size,
        torch.full((batch_size, sequence_length), IGNORE, dtype=torch.int64),
        (0,) * batch_size,
    )
