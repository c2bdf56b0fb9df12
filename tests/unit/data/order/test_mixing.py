"""Proportions of several sources, counted."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disaggkd_cli.data.layout.dataset import TokenizedDataset
from disaggkd_cli.data.order.mixing import Mixture, whole_weights
from disaggkd_cli.data.order.positions import StreamOrder
from disaggkd_cli.data.order.shuffle import permutation
from disaggkd_cli.errors import UserError


@pytest.mark.parametrize(
    ("weights", "whole"),
    [([3, 1], (3, 1)), ([6, 2], (3, 1)), ([0.75, 0.25], (3, 1)), ([0.1, 0.2, 0.7], (1, 2, 7)), ([5], (1,))],
)
def test_weights_become_whole_numbers(weights, whole):
    assert whole_weights(weights) == whole


@pytest.mark.parametrize("weights", [[0, 1], [-1, 1], [float("nan"), 1], [float("inf"), 1], [True, 1], ["3", 1]])
def test_weights_that_are_none_are_refused(weights):
    with pytest.raises(UserError, match="data.train: weights must be"):
        whole_weights(weights)


def test_proportions_that_are_never_reached_are_refused():
    with pytest.raises(UserError, match=r"only reached every 1,[0-9,]+ sequences; round them"):
        whole_weights([0.123457, 1])


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(0, 300), st.integers(1, 200))
def test_every_stretch_is_in_proportion(weights, start, number):
    weights = whole_weights(weights)
    source, within = Mixture.of(weights).sources(start, number)
    total = sum(weights)
    all_sources, all_within = Mixture.of(weights).sources(0, start + number)
    assert (all_sources[start:] == source).all() and (all_within[start:] == within).all()
    for index, weight in enumerate(weights):
        here = all_within[all_sources == index]
        assert here.tolist() == list(range(len(here)))
        share = np.cumsum(all_sources == index) - np.arange(1, start + number + 1) * weight / total
        assert np.abs(share).max() < max(1, len(weights) - 1)
    if number >= total:
        assert np.bincount(source[:total], minlength=len(weights)).tolist() == list(weights)


def test_three_to_one_takes_one_of_four_from_the_second():
    assert Mixture.of((3, 1)).pattern.tolist() == [0, 0, 1, 0]
    assert Mixture.of((1, 1)).pattern.tolist() == [0, 1]


def dataset(sizes, weights=(), length_bucketing=False):
    count = sum(sizes)
    lengths = np.arange(count) * 7 % 11 + 1
    ends = np.cumsum(lengths)
    return TokenizedDataset(
        input_ids=np.zeros(ends[-1], np.int32),
        labels=np.zeros(ends[-1], np.int32),
        sequence_ends=ends,
        document_lengths=lengths.astype(np.int32),
        documents_before=np.arange(count + 1),
        supervised_counts=lengths.astype(np.int32),
        fingerprint="",
        notes=[],
        source_sizes=sizes if len(sizes) > 1 else (),
        weights=weights,
        length_bucketing=length_bucketing,
    )


@pytest.mark.parametrize("bucketed", [False, True])
def test_two_sources_three_to_one_with_epochs_of_their_own(bucketed):
    # 900 draws of 30 sequences: thirty epochs of one; 300 draws of 100: three of the other.
    order = StreamOrder(dataset((30, 100), (3, 1), bucketed), seed=5, batch=4).indices(0, 1280)
    first, second = order[order < 30], order[order >= 30]
    assert len(first) == 3 * len(second) == 960
    assert np.bincount(first[:900] if not bucketed else first, minlength=30).min() >= 30
    assert np.bincount(second - 30).tolist().count(3) >= 80
    if not bucketed:
        assert first[:30].tolist() == permutation(30, 5, 0).tolist()
        assert second[:100].tolist() == (30 + permutation(100, 5, 0, "order of source 1")).tolist()
        assert all((order[start : start + 4] < 30).sum() == 3 for start in range(1277))


@pytest.mark.parametrize("sizes", [(97,), (30, 67), (300, 5)])
@pytest.mark.parametrize("bucketed", [False, True])
def test_the_order_is_read_from_any_position(sizes, bucketed):
    data = dataset(sizes, (2, 1) if len(sizes) > 1 else (), bucketed)
    whole = StreamOrder(data, seed=5, batch=3).indices(0, 900)
    for start, number in ((0, 7), (50, 60), (96, 3), (190, 400), (899, 1), (5, 0)):
        assert StreamOrder(data, seed=5, batch=3).indices(start, number).tolist() == whole[start:][:number].tolist()


def test_a_single_source_in_plain_order_is_as_ever():
    data = dataset((97,))
    assert StreamOrder(data, seed=5, batch=3).indices(0, 97).tolist() == permutation(97, 5, 0).tolist()
