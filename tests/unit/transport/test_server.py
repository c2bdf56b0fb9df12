"""Whose turn it is at a teacher."""

from types import SimpleNamespace

from disaggkd_cli.transport.server import next_in_turn


def student(waiting, buffers=2):
    return SimpleNamespace(asked=[0] * waiting, free_buffers=[0] * buffers)


def turns(links, count):
    turn, order = 0, []
    for _ in range(count):
        chosen = next_in_turn(links, turn)
        order.append(chosen)
        if chosen is not None:
            links[chosen].asked.pop()
            turn = chosen + 1
    return order


def test_students_with_a_backlog_take_turns():
    assert turns([student(3), student(1), student(3)], 8) == [0, 1, 2, 0, 2, 0, 2, None]


def test_a_student_that_takes_no_replies_is_passed_over():
    assert turns([student(3, buffers=0), student(2)], 3) == [1, 1, None]


def test_a_turn_that_points_past_a_link_that_left_still_finds_the_rest():
    assert next_in_turn([student(1)], 5) == 0
    assert next_in_turn([], 5) is None
