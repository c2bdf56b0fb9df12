import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disaggkd_cli.data.order.shuffle import permutation, sequence_indices

counts = st.integers(1, 50)
seeds = st.integers(0, 2**64)


@given(counts, seeds, st.integers(0, 5))
def test_each_epoch_is_a_permutation(count, seed, epoch):
    assert sorted(sequence_indices(count, seed, epoch * count, count)) == list(range(count))


@given(counts, seeds, st.integers(0, 200), st.lists(st.integers(0, 40), max_size=8))
def test_the_stream_does_not_depend_on_how_it_is_asked_for(count, seed, start, steps):
    whole = sequence_indices(count, seed, start, sum(steps))
    parts = [sequence_indices(count, seed, start + sum(steps[:i]), step) for i, step in enumerate(steps)]
    assert whole.tolist() == [index for part in parts for index in part.tolist()]


def test_epochs_seeds_and_purposes_differ():
    first = permutation(100, 42, 0).tolist()
    assert first != permutation(100, 42, 1).tolist()
    assert first != permutation(100, 43, 0).tolist()
    assert first != permutation(100, 42, 0, purpose="evaluation").tolist()


def test_the_order_is_the_same_in_every_release():
    """A resumed run must go on in the order in which it began, whatever version of NumPy is there by then."""
    assert permutation(8, 42, 0).tolist() == [6, 4, 0, 2, 7, 5, 3, 1]


def test_indices_can_be_used_to_index():
    indices = sequence_indices(5, 1, 3, 4)
    assert indices.dtype == np.int64 and indices.shape == (4,)
    assert sequence_indices(5, 1, 3, 0).shape == (0,)


def test_one_caller_cannot_change_what_another_gets():
    sequence_indices(7, 3, 0, 14)[:] = 0
    sequence_indices(7, 3, 0, 7)[:] = 0
    assert sorted(sequence_indices(7, 3, 0, 7)) == list(range(7))


@pytest.mark.parametrize("count, start, number", [(0, 0, 1), (5, -1, 1), (5, 0, -1)])
def test_positions_that_do_not_exist_are_refused(count, start, number):
    with pytest.raises(ValueError):
        sequence_indices(count, 0, start, number)
