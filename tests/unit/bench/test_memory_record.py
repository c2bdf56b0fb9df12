"""What a rank writes of its own memory, and what is read back."""

import torch

from disaggkd_cli.training.memory_record import MemoryRecord, read_memory_records
from disaggkd_cli.training.process import keep_memory_record


def test_a_rank_records_what_it_took(tmp_path):
    keep_memory_record(tmp_path, "teacher 0", torch.device("cpu"))
    (record,) = read_memory_records(tmp_path)
    assert (record.rank, record.device) == ("teacher 0", "cpu")
    assert record.peak_bytes >= record.start_bytes > 1 << 20
    assert record.above_start == record.peak_bytes - record.start_bytes


def test_a_damaged_record_is_left_out(tmp_path):
    keep_memory_record(tmp_path, "student 0", torch.device("cpu"))
    (tmp_path / "teacher_0.memory.json").write_text('{"rank": ')
    (tmp_path / "teacher_1.memory.json").write_text('{"rank": "teacher 1"}')
    assert [one.rank for one in read_memory_records(tmp_path)] == ["student 0"]
    assert read_memory_records(tmp_path / "nowhere") == []


def test_on_a_gpu_nothing_is_taken_off():
    assert MemoryRecord("teacher 0", "cuda:0", 500, 700).above_start == 700
    assert MemoryRecord("teacher 0", "cpu", 500, 700).above_start == 200
