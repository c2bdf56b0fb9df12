"""Whose turn it is at a teacher, and who may go along in the same forward."""

from collections import Counter
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from disaggkd_cli.transport.turns import next_group, next_in_turn


def student(*shapes, buffers=2):
    """A link on which requests of these (sequences, length) wait."""
    pending = [
        SimpleNamespace(request=SimpleNamespace(input_ids=torch.empty(b, s), num_tokens=b * s)) for b, s in shapes
    ]
    return SimpleNamespace(pending=pending, free_buffers=[0] * buffers)


def students(*backlogs):
    return [student(*[(1, 4)] * backlog) for backlog in backlogs]


def turns(links, count):
    turn, order = 0, []
    for _ in range(count):
        chosen = next_in_turn(links, turn)
        order.append(chosen)
        if chosen is not None:
            links[chosen].pending.pop()
            turn = chosen + 1
    return order


def test_students_with_a_backlog_take_turns():
    assert turns(students(3, 1, 3), 8) == [0, 1, 2, 0, 2, 0, 2, None]


def test_a_student_that_takes_no_replies_is_passed_over():
    assert turns([student(*[(1, 4)] * 3, buffers=0), *students(2)], 3) == [1, 1, None]


def test_a_turn_that_points_past_a_link_that_left_still_finds_the_rest():
    assert next_in_turn(students(1), 5) == 0
    assert next_in_turn([], 5) is None


def test_without_merging_a_forward_answers_one_request():
    assert next_group(students(2, 2), 1, 0) == [1]
    assert next_group(students(0, 0), 1, 1000) == []
    assert next_group([], 0, 1000) == []


def test_the_first_request_goes_whatever_its_size():
    assert next_group([student((8, 100)), student((1, 100))], 0, 10) == [0]


def test_those_who_go_along_take_turns_within_the_limit():
    assert next_group(students(2, 1, 2), 1, 5 * 4) == [1, 2, 0, 2, 0]
    assert next_group(students(2, 1, 2), 1, 5 * 4 - 1) == [1, 2, 0, 2]


def test_a_link_gives_no_more_requests_than_it_has_send_buffers():
    links = [student(*[(1, 4)] * 5, buffers=2), student((1, 4), buffers=0)]
    assert next_group(links, 0, 1000) == [0, 0]


def test_other_lengths_wait_for_their_turn_and_nobody_overtakes_on_his_own_link():
    links = [student((1, 4), (1, 5), (1, 4), buffers=3), student((1, 5)), student((2, 4))]
    assert next_group(links, 0, 1000) == [0, 2]


@st.composite
def links_and_turn(draw):
    shape = st.tuples(st.integers(1, 3), st.sampled_from([4, 5]))
    links = [
        student(*draw(st.lists(shape, max_size=4)), buffers=draw(st.integers(0, 3)))
        for _ in range(draw(st.integers(1, 4)))
    ]
    return links, draw(st.integers(0, 5))


@given(links_and_turn(), st.integers(0, 60))
def test_a_group_fits_and_leaves_out_nothing_that_would(case, merge_tokens):
    links, turn = case
    group = next_group(links, turn, merge_tokens)
    assert group[:1] == [index for index in [next_in_turn(links, turn)] if index is not None]
    taken = Counter(group)
    requests = [waiting.request for index, count in taken.items() for waiting in links[index].pending[:count]]
    tokens = sum(request.num_tokens for request in requests)
    assert len({request.input_ids.shape[1] for request in requests}) <= 1
    assert len(group) <= 1 or tokens <= merge_tokens
    for index, link in enumerate(links):
        able = min(len(link.pending), len(link.free_buffers))
        assert taken[index] <= able
        if group and taken[index] < able:
            following = link.pending[taken[index]].request
            same_length = following.input_ids.shape[1] == requests[0].input_ids.shape[1]
            assert not same_length or tokens + following.num_tokens > merge_tokens


@given(st.lists(st.sampled_from([4, 5, 6]), min_size=1, max_size=4), st.integers(0, 40))
def test_every_student_with_a_backlog_is_first_within_one_round(lengths, merge_tokens):
    """Whatever the others ask for, nobody waits longer than one forward for each student."""
    links, turn, firsts = [student(*[(1, length)] * 50) for length in lengths], 0, []
    for _ in range(2 * len(links)):
        group = next_group(links, turn, merge_tokens)
        turn = group[0] + 1
        firsts.append(group[0])
        for index in group:
            links[index].pending.pop(0)
    assert firsts == 2 * list(range(len(links)))
