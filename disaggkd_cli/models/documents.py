"""Whether documents share a row, as the host knows it: a model need not read it back from the GPU.

transformers finds out from position ids, whose values it reads: the host waits for the GPU, once for each kind of mask
(with flash-attn and one row, once a layer). Within `documents_known` it is told instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import transformers.masking_utils
import transformers.modeling_flash_attention_utils as flash_utils
from torch import Tensor

Documents = Sequence[Sequence[int]]
"""Lengths of documents, row by row; each row sums to S."""

_known: ContextVar[Documents | None] = ContextVar("documents", default=None)


@contextmanager
def documents_known(documents: Documents | None) -> Iterator[None]:
    """Within, this thread's forwards are of rows that hold these documents; None: they are not known."""
    before = _known.set(documents)
    try:
        yield
    finally:
        _known.reset(before)


def known_documents() -> Documents | None:
    """Return what `documents_known` was told."""
    return _known.get()


def documents_share_rows() -> bool | None:
    """Return whether a row holds more than one document; None where that is not known."""
    documents = _known.get()
    return None if documents is None else any(len(row) > 1 for row in documents)


def _number_documents(own: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
    def find(position_ids: Tensor) -> Tensor | None:
        share = documents_share_rows()
        if share is None:
            return own(position_ids)
        if not share:
            return None
        # As transformers numbers them: a new one begins wherever the next position is not one more.
        return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)

    return find


def _are_packed(own: Callable[..., Any]) -> Callable[..., Any]:
    def packed(position_ids: Tensor | None, batch_size: int) -> Any:
        # Documents that share rows come with their boundaries, and this is not asked.
        return False if documents_share_rows() is False else own(position_ids, batch_size)

    return packed


for _module, _name, _told in (
    (transformers.masking_utils, "find_packed_sequence_indices", _number_documents),
    (flash_utils, "_is_packed_sequence", _are_packed),
):
    if hasattr(_module, _name):  # a release without it finds documents its own way, at the price of a wait
        setattr(_module, _name, _told(getattr(_module, _name)))
