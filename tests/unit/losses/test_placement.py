"""Rows to the heads or heads to the rows: bytes by hand, and what auto makes of them."""

from __future__ import annotations

from dataclasses import replace

from disaggkd_cli.losses.placement import HeadTraffic

SMALL = HeadTraffic(
    ranks=4, rows=10, tokens=16, vocabulary=1000, student_width=8, teacher_width=12, student_bytes=2, teacher_bytes=2,
    tied=False, head_trained=True,
)  # fmt: skip


def test_bytes_by_hand():
    assert SMALL.heads_bytes == 1000 * 8 * (2 + 4) * 3 / 4
    assert SMALL.rows_bytes == 3 * 10 * (8 * 2 + 12 * 2) + 2 * 3 * 10 * 8 * 2
    tied = replace(SMALL, tied=True)
    assert tied.rows_bytes == SMALL.rows_bytes + 3 * 16 * 8 * 2 * 2
    frozen = replace(tied, head_trained=False)
    assert frozen.heads_bytes == 1000 * 8 * 2 * 3 / 4
    assert frozen.rows_bytes == SMALL.rows_bytes + 3 * 16 * 8 * 2


def test_rows_travel_while_they_are_few():
    assert SMALL.rows_should_travel
    assert not replace(SMALL, rows=1000).rows_should_travel
    assert replace(SMALL, rows=1000, vocabulary=100_000).rows_should_travel


def test_one_rank_gathers_nothing():
    assert replace(SMALL, ranks=1).heads_bytes == replace(SMALL, ranks=1).rows_bytes == 0
    assert not replace(SMALL, ranks=1).rows_should_travel
