"""What a rank writes of its own memory, and what is read back."""

from types import SimpleNamespace

import torch

from disaggkd_cli.training.memory_record import MemoryRecord, read_memory_records
from disaggkd_cli.training.process import GPU_CAP, cap_gpu_memory, keep_memory_record


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


def test_a_cap_on_a_gpu_is_a_share_of_its_memory(monkeypatch):
    """On a stand-in for the GPU: that torch then refuses more has not been run on one."""
    set_shares = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1000))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: set_shares.append(given))
    gpu = torch.device("cuda", 0)
    monkeypatch.delenv(GPU_CAP, raising=False)
    assert cap_gpu_memory(gpu) is None
    monkeypatch.setenv(GPU_CAP, "250")
    assert cap_gpu_memory(torch.device("cpu")) is None and not set_shares
    assert cap_gpu_memory(gpu) == 250 and set_shares == [(0.25, gpu)]
