"""Packing against its specification: nothing lost, nothing leaks, rows are full."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disaggkd_cli.data.layout.flat_documents import join, next_token_labels
from disaggkd_cli.data.layout.micro_batch import IGNORE
from disaggkd_cli.data.layout.rows import best_fit, cut_consecutively, one_per_row, pack
from disaggkd_cli.data.tokenise.encoding import EncodedDocument


@st.composite
def document_sets(draw, longest=40):
    """Documents whose tokens are all different, so that each token tells where it came from."""
    documents, first = [], 0
    for length in draw(st.lists(st.integers(1, longest), min_size=1, max_size=12)):
        supervised = np.asarray(draw(st.lists(st.booleans(), min_size=length, max_size=length)))
        tokens = np.arange(first, first + length, dtype=np.int32)
        documents.append(EncodedDocument(tokens, supervised, draw(st.booleans())))
        first += length
    return documents


def rows_as_lists(rows):
    """Per row: its documents as lists of (token, label)."""
    pieces = rows.pieces
    pairs = list(zip(pieces.input_ids.tolist(), pieces.labels.tolist(), strict=True))
    documents = [pairs[start:end] for start, end in zip(pieces.starts, pieces.ends, strict=True)]
    return [documents[start:end] for start, end in zip(rows.pieces_before[:-1], rows.pieces_before[1:], strict=True)]


@pytest.mark.parametrize("lay_out", [pack, one_per_row])
@given(documents=document_sets(), length=st.integers(2, 20))
def test_nothing_is_lost_and_nothing_crosses_a_document(lay_out, documents, length):
    rows = rows_as_lists(lay_out(join(documents), length))
    seen = {}
    for row in rows:
        assert 0 < sum(map(len, row)) <= length
        for piece in row:
            tokens = [token for token, _ in piece]
            # A piece is a run of one document's tokens: ids of different documents never touch within it.
            assert tokens == list(range(tokens[0], tokens[0] + len(tokens)))
            seen.update(piece)
    expected = {}
    for document in documents:
        labels = next_token_labels(document.input_ids, document.supervised)
        expected.update(zip(document.input_ids.tolist(), labels.tolist(), strict=True))
    assert seen == expected
    assert sum(len(piece) for row in rows for piece in row) == len(expected)
    starts = {int(document.input_ids[0]) for document in documents}
    for row in rows:
        for piece in row:
            assert not starts & {token for token, _ in piece[1:]}
            for token, label in piece[:-1]:
                assert label in (IGNORE, token + 1)
            # The last label of a piece is its document's next token, if it was cut, and never another document's.
            assert piece[-1][1] == IGNORE or piece[-1][1] not in starts


@given(documents=document_sets(), length=st.integers(2, 20))
def test_text_fills_its_rows(documents, length):
    text = join([document for document in documents if document.is_text])
    rows = rows_as_lists(pack(text, length))
    assert all(sum(map(len, row)) == length for row in rows[:-1])
    assert len(rows) == -(-len(text.input_ids) // length)


@given(documents=document_sets(longest=10), length=st.integers(10, 20))
def test_what_must_stay_whole_does(documents, length):
    whole = {tuple(document.input_ids.tolist()) for document in documents if not document.is_text}
    for row in rows_as_lists(pack(join(documents), length)):
        whole -= {tuple(token for token, _ in piece) for piece in row}
    assert not whole


@given(st.lists(st.integers(1, 10), max_size=30).map(np.asarray), st.integers(10, 20))
def test_best_fit_puts_each_in_one_bin_and_wastes_less_than_half(lengths, capacity):
    lengths = lengths.astype(np.int64)
    bins = best_fit(lengths, capacity)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    fill = [int(lengths[members].sum()) for members in bins]
    assert all(amount <= capacity for amount in fill)
    assert len(bins) <= 1 or sum(fill) * 2 > capacity * len(bins)


def test_best_fit_takes_the_fullest_bin_that_has_room():
    assert best_fit(np.asarray([3, 6, 4, 5]), 10) == [[1, 2], [3, 0]]
    with pytest.raises(ValueError):
        best_fit(np.asarray([3, 11]), 10)


def test_cutting_keeps_short_documents_and_cuts_long_ones_consecutively():
    documents = join(
        EncodedDocument(np.arange(start, start + length, dtype=np.int32), np.ones(length, bool), True)
        for start, length in ((0, 3), (10, 7), (20, 6))
    )
    pieces = cut_consecutively(documents, 3)
    assert pieces.lengths.tolist() == [3, 3, 3, 1, 3, 3]
    assert pieces.input_ids.tolist() == documents.input_ids.tolist()
    assert pieces.labels.tolist() == documents.labels.tolist()


def test_how_many_tokens_are_supervised_does_not_depend_on_where_rows_end():
    documents = join(
        EncodedDocument(np.arange(length, dtype=np.int32), np.ones(length, bool), True) for length in (1, 17, 33, 64)
    )
    for length in (2, 3, 7, 64, 1000):
        for lay_out in (pack, one_per_row):
            assert (lay_out(documents, length).pieces.labels != IGNORE).sum() == 0 + 16 + 32 + 63
