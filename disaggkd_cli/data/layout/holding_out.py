"""Hold some documents out for evaluation, before anything is packed, so that no row holds both.

Which ones is decided by a hash of the seed and the document's own tokens, so that the order of the files has no say,
and copies of a document never land on both sides. Where there are too few documents for that (a handful of books), the
last part of each text is held out instead.
"""

from __future__ import annotations

import hashlib

import numpy as np

from disaggkd_cli.data.layout.flat_documents import TokenizedDocuments
from disaggkd_cli.data.notes import Notes
from disaggkd_cli.errors import UserError


def hold_out(
    documents: TokenizedDocuments, fraction: float, seed: int, notes: Notes
) -> tuple[TokenizedDocuments, TokenizedDocuments]:
    """(documents to train on, documents held out).

    Raises:
        UserError: a fraction outside 0 … 1, or nothing that can be held out.
    """
    if not 0 < fraction < 1:
        raise UserError(f"data.eval: {fraction} must be a fraction between 0 and 1, or a path")
    number = round(fraction * len(documents))
    if number < 1 and documents.is_text.all():
        return _hold_out_tails(documents, fraction, notes)
    ranks = _hashes(documents, seed)
    # All copies of the last one chosen are chosen too.
    limit = np.sort(ranks)[max(number, 1) - 1]
    held = ranks <= limit
    if held.all():
        raise UserError(
            f"data.eval: no document is left to train on once {fraction:g} of the {len(documents)} (counting copies of "
            "one another together) are held out; name a file of its own with data.eval"
        )
    notes.add(
        f"data.eval: {held.sum()} of {len(documents)} documents are held out "
        f"({documents.lengths[held].sum()} of {documents.token_count} tokens)"
    )
    return documents.select(~held), documents.select(held)


def without_copies(
    train: list[TokenizedDocuments], held: list[TokenizedDocuments], seed: int, notes: Notes
) -> list[TokenizedDocuments]:
    """The training documents of several sources without copies of what another source has held out.

    Raises:
        UserError: a source has no document left.
    """
    if len(train) == 1:
        return train
    held_hashes = np.unique(np.concatenate([_hashes(documents, seed) for documents in held]))
    left = []
    for documents in train:
        copies = np.isin(_hashes(documents, seed), held_hashes)
        if copies.any():
            notes.add(f"data.eval: {copies.sum()} copies of held-out documents are left out of other sources")
        if copies.all():
            raise UserError(
                "data.eval: all documents of a source of data.train are copies of another's that are held out; "
                "leave that source out, or name a file of its own with data.eval"
            )
        left.append(documents.select(~copies))
    return left


def _hashes(documents: TokenizedDocuments, seed: int) -> np.ndarray:
    """[D] uint64: a keyed hash of each document's tokens."""
    key = hashlib.sha256(f"disaggkd held out seed={seed}".encode()).digest()
    digests = (
        hashlib.blake2b(np.ascontiguousarray(documents.flat_ids[begin:stop], "<i4"), digest_size=8, key=key).digest()
        for begin, stop in zip(documents.begins.tolist(), documents.stops.tolist(), strict=True)
    )
    return np.asarray([int.from_bytes(digest, "little") for digest in digests], np.uint64)


def _hold_out_tails(
    documents: TokenizedDocuments, fraction: float, notes: Notes
) -> tuple[TokenizedDocuments, TokenizedDocuments]:
    held = np.maximum(np.round(documents.lengths * fraction).astype(np.int64), 2)
    cuts = documents.stops - held
    if (cuts - documents.begins < 2).any():
        raise UserError(
            f"data.eval: {len(documents)} documents are too few and too short to hold {fraction:g} of them out; "
            "name a file of its own with data.eval"
        )
    # The label of the last token before a cut is the first token held out.
    unlabelled = np.union1d(documents.unlabelled, cuts - 1)
    notes.add(
        f"data.eval: {fraction:g} of {len(documents)} documents is less than one; instead the last {fraction:g} of "
        f"each text is held out ({held.sum()} of {documents.token_count} tokens)"
    )
    train = documents.pieces(documents.begins, cuts, documents.is_text, unlabelled)
    return train, documents.pieces(cuts, documents.stops, documents.is_text)
