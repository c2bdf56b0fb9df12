"""Who links with whom once there are many: everybody is served, nobody by too many, and few links move."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disaggkd_cli.config.links import links_of_ranks
from disaggkd_cli.planner.constants import constant
from disaggkd_cli.transport.neighbours import LOOK_SECONDS, Neighbourhood, neighbouring
from disaggkd_cli.transport.request_queue import MOST_REPLIES

SIZES = {"teachers": st.integers(1, 300), "ranks": st.integers(1, 200), "links": st.integers(1, 12)}


@given(**SIZES)
def test_every_teacher_serves_and_every_rank_has_enough(teachers, ranks, links):
    sets = [neighbouring(range(teachers), rank, ranks, links) for rank in range(ranks)]
    assert set().union(*sets) == set(range(teachers))
    assert all(len(own) >= min(links, teachers) for own in sets)
    most_of_student, most_of_teacher = links_of_ranks(teachers, ranks, links)
    assert max(map(len, sets)) == most_of_student
    served = [sum(number in own for own in sets) for number in range(teachers)]
    assert max(served) == most_of_teacher
    assert max(served) - min(served) <= 1
    if ranks >= teachers:
        assert most_of_student <= 2 * links


@given(**SIZES)
def test_a_teacher_that_comes_moves_no_link_that_stays_in_the_neighbourhood(teachers, ranks, links):
    for rank in {0, ranks // 2, ranks - 1}:
        before = neighbouring(range(teachers), rank, ranks, links)
        after = neighbouring(range(teachers + 1), rank, ranks, links)
        assert after - {teachers} <= before, "groups only split, they never mix"


def test_the_dead_do_not_thin_the_groups_out(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("disaggkd_cli.transport.neighbours.time.monotonic", lambda: now[0])
    heartbeats = dict.fromkeys(range(16), 0)
    ours = Neighbourhood(rank=1, ranks=4, links=2)
    assert ours.of(heartbeats, heartbeats.get) == {1, 5, 9, 13}
    for _ in range(2):
        now[0] += LOOK_SECONDS
        heartbeats = {number: count + (number < 3) for number, count in heartbeats.items()}
        wanted = ours.of(heartbeats, heartbeats.get)
    assert wanted == {0, 1, 2}, "three are left alive, fewer than twice two links: all of them"
    heartbeats[7] += 1
    now[0] += LOOK_SECONDS
    assert 7 in ours.of(heartbeats, lambda number: heartbeats[number] + (number < 3)), (
        "a stopped one that goes on counts again"
    )


def test_a_single_rank_links_to_all():
    assert Neighbourhood(rank=0, ranks=1, links=2).of(range(50), lambda number: 0) == set(range(50))


def test_the_planner_counts_what_the_transport_keeps():
    assert constant("most_replies") == MOST_REPLIES


@pytest.mark.parametrize("teachers, ranks, expected", [(119, 905, (15, 114)), (8, 56, (8, 56)), (16, 2, (8, 1))])
def test_sizes(teachers, ranks, expected):
    assert links_of_ranks(teachers, ranks, 8) == expected
