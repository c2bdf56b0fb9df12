"""Layouts of the teacher as modes of `bench step`."""

import pytest

from disaggkd_cli.bench.layouts import LAYOUT_MODES, format_layouts, layout_overrides, moved_bytes_per_token
from disaggkd_cli.config import load
from tests.support.runs import write_config


@pytest.fixture
def path(tmp_path):
    return str(write_config(tmp_path / "run.yaml"))


def test_each_mode_is_a_layout_on_as_many_ranks(path):
    for asked, ranks in ((1, 2), (3, 3)):
        config = load(path, [f"teacher.ranks_per_replica={asked}"])
        for mode in LAYOUT_MODES:
            made = load(path, layout_overrides(config, mode))
            assert made.teacher.ranks_per_replica == (1 if mode == "teacher_one_rank" else ranks)
            assert mode == "teacher_one_rank" or f"teacher_{made.teacher.parallelism}" == mode


def test_what_the_ranks_move_for_a_token(path):
    """tiny-austen: float32, 4 layers of width 128; micro-batches of 4 x 48 tokens, every row asked for."""
    moved = {
        mode: moved_bytes_per_token(load(path, layout_overrides(load(path), mode))) for mode in LAYOUT_MODES
    }  # fmt: skip
    assert moved["teacher_one_rank"] == 0
    assert moved["teacher_pipeline"] == pytest.approx(4 * 128 * 2, rel=0.03)
    backbone = moved["teacher_fsdp"] * 4 * 48 / 4
    assert 500_000 < backbone < 1_500_000, "each of two ranks receives half of the weights for a forward of its own"
    three = load(path, [*layout_overrides(load(path), "teacher_pipeline"), "teacher.ranks_per_replica=3"])
    assert moved_bytes_per_token(three) - moved["teacher_pipeline"] == 4 * 128


def test_the_table_compares_layouts_only():
    one = {"tokens_per_second": 1000.0, "training_bytes": {"teacher": 2**20}, "peak_bytes": {}, "losses": [1.0, 2.0]}
    modes = {
        "disaggregated_fused": one,
        "teacher_one_rank": {**one, "teacher_moved_bytes_per_token": 0.0},
        "teacher_pipeline": {**one, "teacher_moved_bytes_per_token": 1024.0},
        "teacher_tensor": {**one, "teacher_moved_bytes_per_token": 0.0, "losses": [1.0, 2.5]},
    }
    lines = format_layouts(modes)
    assert len(lines) == 5 and not any("disaggregated" in line for line in lines)
    assert "1.00 KiB" in lines[2] and lines[2].endswith("the same bits")
    assert "not counted" in lines[3] and lines[3].endswith("0.5 apart")
    assert format_layouts({"disaggregated_fused": one}) == []
