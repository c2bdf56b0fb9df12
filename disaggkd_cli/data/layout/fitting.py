"""What becomes of documents that are longer than a sequence."""

from __future__ import annotations

from typing import Any

import numpy as np

from disaggkd_cli.data.layout.flat_documents import TokenizedDocuments
from disaggkd_cli.data.notes import Notes
from disaggkd_cli.errors import UserError

_DROPPED_UNASKED = 0.05


def drop_long(
    documents: TokenizedDocuments, key: str, settings: dict[str, Any], notes: Notes, *, under_way: bool = False
) -> TokenizedDocuments:
    """Apply `data.long_documents` to what is longer than a sequence. What is kept of it is cut when it is laid out.

    "auto" keeps running text, which can be cut without loss, and drops prompts with answers, whose later parts would
    lack their prompts, as long as they are few. `under_way`: training has begun, so however many are dropped, it is
    said and no longer refused.
    """
    length, policy = settings["sequence_length"], settings["long_documents"]
    long = documents.lengths > length
    if not long.any():
        return documents
    what = (
        f"{key}: {long.sum()} of {len(documents)} documents are longer than data.sequence_length={length} "
        f"(longest: {documents.lengths.max()} tokens)"
    )
    if policy == "error":
        raise UserError(f"{what}; raise data.sequence_length, or set data.long_documents to split or drop")
    dropped = {"drop": long, "auto": long & ~documents.is_text, "split": np.zeros_like(long)}[policy]
    share = dropped.sum() / len(documents)
    if policy == "auto" and not under_way and share > _DROPPED_UNASKED:
        raise UserError(
            f"{what}, and {dropped.sum()} of them are prompts with answers, which can't be cut without parting the "
            "answer from its prompt. Raise data.sequence_length, or set data.long_documents to drop or split"
        )
    if dropped.all() and not under_way:
        raise UserError(f"{what}: none is left (data.long_documents={policy}); raise data.sequence_length")
    cut = long & ~dropped
    if cut.any():
        pairs = (cut & ~documents.is_text).sum()
        warning = f"; {pairs} of them are prompts with answers, whose later parts lack their prompts" if pairs else ""
        notes.add(f"{what}: {cut.sum()} go on in the next sequence{warning}")
    if dropped.any():
        notes.add(f"{what}: WARNING, {dropped.sum()} of them ({share:.1%} of all) are LEFT OUT")
    return documents.select(~dropped)
