import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from disaggkd_cli.data import (
    IGNORE,
    Sequence,
    collate,
    empty_micro_batch,
    flatten_lengths,
    lengths_by_row,
    position_ids_from_lengths,
)


def sequence(lengths, first=10):
    ids = np.arange(first, first + sum(lengths), dtype=np.int32)
    labels = ids + 1
    labels[np.cumsum(lengths) - 1] = IGNORE
    return Sequence(ids, labels, tuple(lengths))


def test_rows_are_padded_to_the_longest_and_padding_continues_the_last_document_without_labels():
    batch = collate([sequence((2, 3)), sequence((3,), first=20)], pad_id=7)
    assert batch.input_ids.tolist() == [[10, 11, 12, 13, 14], [20, 21, 22, 7, 7]]
    assert batch.labels.tolist() == [[11, -100, 13, 14, -100], [21, 22, -100, -100, -100]]
    assert batch.document_lengths == ((2, 3), (5,))
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert batch.row_lengths == (5, 3)
    assert batch.token_mask.tolist() == [[True] * 5, [True, True, True, False, False]]
    assert batch.rows.tolist() == [0, 2, 3, 5, 6]
    assert batch.row_labels.tolist() == [11, 13, 14, 21, 22]
    assert batch.supervised_count == 5
    assert batch.input_ids.dtype == batch.labels.dtype == batch.position_ids.dtype == batch.rows.dtype == torch.int64


def test_a_pad_id_that_is_also_a_real_token_changes_nothing():
    real_end = Sequence(np.asarray([1, 2], np.int32), np.asarray([2, IGNORE], np.int32), (2,))
    batch = collate([real_end, sequence((4,))], pad_id=2)
    assert batch.document_lengths[0] == (4,) and batch.row_lengths[0] == 2
    assert batch.rows.tolist()[0] == 0 and batch.row_labels.tolist()[0] == 2


def test_an_empty_micro_batch_has_its_shape_and_no_rows():
    batch = empty_micro_batch(3, 4, pad_id=5)
    assert batch.input_ids.tolist() == [[5] * 4] * 3
    assert batch.rows.shape == batch.row_labels.shape == (0,)
    assert batch.position_ids.tolist() == [[0, 1, 2, 3]] * 3


@given(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=5))
def test_nested_and_flat_lengths_are_two_forms_of_one_thing(rows):
    longest = max(map(sum, rows))
    rows = [row + [longest - sum(row)] if sum(row) < longest else row for row in rows]
    flat = flatten_lengths(rows)
    assert lengths_by_row(flat, longest) == tuple(map(tuple, rows))
    expected = [[position for length in row for position in range(length)] for row in rows]
    assert position_ids_from_lengths(rows).tolist() == expected
    assert position_ids_from_lengths(flat, longest).tolist() == expected


@pytest.mark.parametrize("lengths", [[3, 2], [5, 1], [4, 0], [4, -1, 1], [2]])
def test_lengths_that_do_not_fill_whole_rows_are_refused(lengths):
    with pytest.raises(ValueError):
        lengths_by_row(lengths, 4)
    with pytest.raises(ValueError):
        position_ids_from_lengths([lengths], 4)


def test_sequences_that_contradict_themselves_are_refused():
    with pytest.raises(ValueError):
        collate([], 0)
    with pytest.raises(ValueError):
        collate([Sequence(np.asarray([1, 2], np.int32), np.asarray([2, -100], np.int32), (1,))], 0)


def test_padding_goes_to_the_multiple_but_not_above_the_limit():
    ids = np.arange(9, dtype=np.int32)
    row = Sequence(ids, ids, (9,))
    assert collate([row], 0).input_ids.shape == (1, 9)
    assert collate([row], 0, multiple=8).input_ids.shape == (1, 16)
    assert collate([row], 0, multiple=8, limit=12).input_ids.shape == (1, 12)
    assert collate([row], 0, multiple=8, limit=4).input_ids.shape == (1, 9), "never cut"


def test_documents_of_no_tokens_are_refused():
    for lengths in ([0, 4], [4, 0, 4], [2, 0, 2]):
        with pytest.raises(ValueError, match="do not fill a row"):
            lengths_by_row(lengths, 4)
