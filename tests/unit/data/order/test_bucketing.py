"""Batches by length: nothing lost, less padded, nobody else has a say."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disaggkd_cli.data.order.bucketing import (
    WINDOW_BATCHES,
    order_by_length,
    padded_tokens,
    positions_by_window,
    window_of,
)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60).map(np.asarray), st.integers(0, 100), st.integers(1, 9))
def test_a_window_is_reordered_and_its_batches_hold_neighbours_in_length(lengths, first, batch):
    order = order_by_length(lengths, first, batch, seed=3)
    assert sorted(order) == list(range(len(lengths)))
    by_batch = {}
    for position, index in enumerate(order, first):
        by_batch.setdefault(position // batch, []).append(int(lengths[index]))
    ranges = sorted((min(found), max(found)) for found in by_batch.values())
    assert all(found == sorted(found) for found in by_batch.values())
    assert all(before[1] <= after[0] for before, after in zip(ranges, ranges[1:], strict=False))


def test_the_batches_of_a_window_do_not_come_by_length():
    lengths = np.arange(64)
    order = order_by_length(lengths, 0, 4, seed=3)
    firsts = order[::4].tolist()
    assert firsts != sorted(firsts)
    assert order.tolist() != order_by_length(lengths, 0, 4, seed=4).tolist()
    assert order.tolist() != order_by_length(lengths, 64, 4, seed=3).tolist()


@given(st.integers(0, 5000), st.integers(1, 9), st.one_of(st.none(), st.integers(1, 700)))
def test_windows_follow_one_another_and_end_with_the_epoch(position, batch, epoch):
    first, after = window_of(position, batch, epoch)
    assert first <= position < after <= first + batch * WINDOW_BATCHES
    assert window_of(first, batch, epoch) == window_of(after - 1, batch, epoch) == (first, after)
    if epoch is not None:
        assert first // epoch == (after - 1) // epoch
    parts = list(positions_by_window(position, 900, batch, epoch))
    assert [begin for *_, begin, _ in parts][1:] == [end for *_, end in parts][:-1]
    assert (parts[0][2], parts[-1][3]) == (position, position + 900)


@pytest.mark.parametrize(
    ("lengths", "rows", "multiple", "limit", "tokens"),
    [
        ([3, 9, 4], 1, 1, 100, 16),
        ([3, 9, 4], 2, 1, 100, 22),  # 9 + 9, 4
        ([3, 9, 4], 2, 8, 100, 16 * 2 + 8),
        ([3, 9, 4], 2, 8, 10, 10 * 2 + 8),
        ([], 2, 8, 10, 0),
    ],
)
def test_padded_tokens_by_hand(lengths, rows, multiple, limit, tokens):
    assert padded_tokens(np.asarray(lengths, np.int64), rows, multiple, limit) == tokens
