"""Who keeps which ids, which ranks are neighbours, and how a broken collective is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disaggkd_cli.config import Config, StudentConfig, TransportConfig
from disaggkd_cli.errors import RunError
from disaggkd_cli.losses import shard_bounds
from disaggkd_cli.training.layout import StudentLayout, group_timeout, layout_of, waiting_for


def layouts(ranks: int, replicate: int, cut: bool = True) -> list[StudentLayout]:
    return [StudentLayout(ranks, replicate, rank, cut) for rank in range(ranks)]


def test_ranks_of_a_copy_are_neighbours():
    assert [(one.shard_ranks, one.shard_rank) for one in layouts(4, 2)] == [(2, 0), (2, 1), (2, 0), (2, 1)]
    assert [(one.shard_ranks, one.shard_rank) for one in layouts(2, 2)] == [(1, 0), (1, 0)]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 6))
def test_both_heads_are_cut_at_the_same_ids_and_every_id_is_kept_once(student, teacher, ranks):
    shared = min(student, teacher)
    cuts = [(one.student_ids(student), one.teacher_ids(student, teacher)) for one in layouts(ranks, 1)]
    for index, ((start, stop), (teacher_start, teacher_stop)) in enumerate(cuts):
        assert (start, stop) == shard_bounds(student, ranks, index)
        assert min(start, shared) == min(teacher_start, shared)
        assert min(stop, shared) == min(teacher_stop, shared)
    for side, vocabulary in ((0, student), (1, teacher)):
        assert [id for cut in cuts for id in range(*cut[side])] == list(range(vocabulary))


def test_without_a_cut_every_rank_keeps_all_ids():
    assert {(one.student_ids(5), one.teacher_ids(5, 7)) for one in layouts(3, 1, False)} == {((0, 5), (0, 7))}


def test_one_rank_a_copy_has_nothing_to_cut():
    config = Config(student=StudentConfig(ranks=2, replicate=2))
    assert not layout_of(config, 0, vocabulary_parallel=True).vocabulary_parallel
    config = Config(student=StudentConfig(ranks=4, replicate=2))
    layout = layout_of(config, 3, vocabulary_parallel=True)
    assert layout == StudentLayout(4, 2, 3, True)
    assert layout.describe() == "sharded over 2 ranks, 2 replicas; each rank keeps 1/2 of both heads"


def test_a_collective_outlasts_the_wait_for_a_teacher():
    config = Config(transport=TransportConfig(timeout=7, teacher_wait=500))
    assert group_timeout(config).total_seconds() == 807


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("[/gloo/transport/tcp/buffer.cc:7] Timed out waiting 20ms for recv", "Timed out waiting 20ms for recv"),
        ("[/gloo/pair.cc:5] Connection closed by peer [::1]:12. This is typical", "Connection closed by peer [::1]:12"),
        ("Connection reset by peer\nmore", "Connection reset by peer"),
    ],
)
def test_a_broken_collective_says_what_it_waited_for(message, told):
    with pytest.raises(RunError) as raised, waiting_for("step 3 of the others"):
        raise RuntimeError(message)
    assert str(raised.value) == (
        f"another student rank is gone or stuck; this one waited for step 3 of the others ({told})"
    )


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="shapes differ"), waiting_for("anything"):
        raise RuntimeError("shapes differ")
