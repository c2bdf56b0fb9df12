"""Division of layers into stages, against trying them all."""

import itertools
import random

import pytest

from disaggkd_cli.layouts.stages import (
    WORTH_MOVING,
    describe,
    divide_layers,
    fullest,
    heaviest,
    idle_for_want_of_requests,
    measured_division,
)


def every_division(count: int, stages: int):
    for cuts in itertools.combinations(range(1, count), stages - 1):
        edges = (0, *cuts, count)
        yield tuple(itertools.pairwise(edges))


@pytest.mark.parametrize("seed", range(30))
def test_no_division_is_lighter(seed):
    generator = random.Random(seed)
    count = generator.randint(1, 9)
    stages = generator.randint(1, count)
    weights = [generator.choice([1, 1, 2, 7, generator.random()]) for _ in range(count)]
    ends = {"before": generator.choice([0, 3]), "after": generator.choice([0, 1.5])}
    found = divide_layers(weights, stages, **ends)
    assert found in list(every_division(count, stages))
    best = min(heaviest(weights, other, **ends) for other in every_division(count, stages))
    assert heaviest(weights, found, **ends) == pytest.approx(best, rel=1e-12)


def test_equal_layers_are_dealt_evenly_and_the_surplus_goes_first():
    assert divide_layers([1.0] * 10, 3) == ((0, 4), (4, 7), (7, 10))
    assert divide_layers([0.1] * 12, 4) == ((0, 3), (3, 6), (6, 9), (9, 12))
    assert divide_layers([1.0] * 4, 4) == ((0, 1), (1, 2), (2, 3), (3, 4))


def test_what_the_ends_carry_counts():
    assert divide_layers([1.0] * 6, 2, before=2.0) == ((0, 2), (2, 6))
    assert divide_layers([1.0] * 6, 2, after=2.0) == ((0, 4), (4, 6))


def test_many_layers_are_no_work():
    division = divide_layers([1.0 + index % 3 for index in range(128)], 16)
    assert len(division) == 16 and division[-1][1] == 128


@pytest.mark.parametrize(("weights", "stages"), [([1.0, 1.0], 3), ([1.0], 0), ([1.0, -1.0], 1)])
def test_what_cannot_be(weights, stages):
    with pytest.raises(ValueError):
        divide_layers(weights, stages)


def test_words():
    assert describe(((0, 12), (12, 13), (13, 24))) == "layers 0-11 | 12 | 13-23"


@pytest.mark.parametrize(
    ("depth", "students", "stages", "replicas", "wanted"),
    [(3, 1, 1, 9, None), (3, 1, 3, 1, None), (3, 1, 4, 1, 4), (3, 2, 4, 2, 4), (1, 3, 4, 1, 2), (2, 8, 8, 2, None)],
)
def test_a_ring_too_shallow_for_the_stages_is_said(depth, students, stages, replicas, wanted):
    said = idle_for_want_of_requests(depth, students, stages, replicas)
    assert said.endswith(f"set transport.ring_depth={wanted}") if wanted else said == ""


def test_layers_move_only_where_that_is_worth_it():
    even = ((0, 2), (2, 4))
    assert measured_division([1.0, 1.0, 1.0, 1.0], even) == (even, 0.0)
    assert measured_division([3.0, 1.0, 1.0, 1.0], even) == (((0, 1), (1, 4)), 0.25)
    slightly = 1 + WORTH_MOVING / 2
    assert measured_division([slightly, 1.0, 1.0, 1.0, 1.0, 1.0], ((0, 2), (2, 4), (4, 6)))[1] == 0.0


def test_the_fullest_stage_is_the_one_that_leaves_least():
    division = ((0, 1), (1, 3), (3, 4))
    assert fullest([5, 1, 1, 4], division, [10, 10, 10]) == (0, 5.0)
    assert fullest([5, 1, 1, 4], division, [10, 10, 10], before=1, after=3) == (2, 3.0)
    assert fullest([5, 1, 1, 4], division, [10, 1, 10]) == (1, -1.0)
    assert fullest([5, 1, 1, 4], division, [4, 10, 10], before=2) == (0, -3.0)
