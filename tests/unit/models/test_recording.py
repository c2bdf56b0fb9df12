"""Hidden states on disk: exact, restartable, and refused where they belong to something else."""

import dataclasses
import json

import pytest
import torch

from disaggkd_cli.errors import UserError
from disaggkd_cli.models.recording import MANIFEST, Recorder, Recording, RecordingIdentity, request_key

IDENTITY = RecordingIdentity("teacher-a", "tokenizer-a", 4, "bfloat16")


def states(number, rows=3):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(number)).to(torch.bfloat16)


def recorded(directory, numbers, shard_bytes=50):
    recorder = Recorder(directory, IDENTITY, shard_bytes)
    for number in numbers:
        recorder.add(f"key-{number}", states(number))
    recorder.flush()
    return recorder


def test_what_was_recorded_comes_back_to_the_last_bit(tmp_path):
    recorder = recorded(tmp_path, range(7))
    assert len(recorder.shards) > 1
    recording = Recording(tmp_path, IDENTITY)
    assert all(torch.equal(recording.hidden(f"key-{number}"), states(number)) for number in range(7))
    assert recording.hidden("key-8") is None


def test_a_request_without_rows(tmp_path):
    recorder = Recorder(tmp_path, IDENTITY)
    recorder.add("none", torch.empty(0, 4))
    recorder.flush()
    assert Recording(tmp_path, IDENTITY).hidden("none").shape == (0, 4)


def test_an_interrupted_recording_goes_on(tmp_path):
    first = Recorder(tmp_path, IDENTITY, shard_bytes=50)
    for number in range(5):
        first.add(f"key-{number}", states(number))
    assert len(first.shards) == 1, "two answers fill a shard of 50 bytes only with three"
    (tmp_path / ".states_00001.safetensors.1.writing").write_bytes(b"half a shard")
    again = Recorder(tmp_path, IDENTITY, shard_bytes=50)
    assert again.keys == {"key-0", "key-1", "key-2"}
    for number in range(5):
        again.add(f"key-{number}", states(number))
    again.flush()
    recording = Recording(tmp_path, IDENTITY)
    assert sorted(recording.keys) == [f"key-{number}" for number in range(5)]
    assert all(torch.equal(recording.hidden(f"key-{number}"), states(number)) for number in range(5))
    assert not list(tmp_path.glob(".*.writing"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"teacher": "teacher-b"}, "teacher .teacher-a recorded, teacher-b now"),
        ({"tokenizer": "tokenizer-b"}, "tokenizer .tokenizer-a recorded"),
        ({"hidden_size": 8}, "hidden size .4 recorded, 8 now"),
        ({"dtype": "float32"}, "dtype .bfloat16 recorded, float32 now"),
    ],
)
def test_a_recording_of_something_else_is_refused(tmp_path, change, named):
    recorded(tmp_path, range(2))
    with pytest.raises(UserError, match=named):
        Recording(tmp_path, dataclasses.replace(IDENTITY, **change))
    with pytest.raises(UserError, match=named):
        Recorder(tmp_path, dataclasses.replace(IDENTITY, **change))


def test_no_recording_and_damaged_ones(tmp_path):
    with pytest.raises(UserError, match="holds no recording"):
        Recording(tmp_path, IDENTITY)
    recorder = recorded(tmp_path, range(3))
    (tmp_path / recorder.shards[0]).write_bytes(b"\x00" * 20)
    with pytest.raises(UserError, match="states_00000.safetensors is missing or damaged"):
        Recording(tmp_path, IDENTITY)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(UserError, match="format 99"):
        Recording(tmp_path, IDENTITY)
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        Recording(tmp_path, IDENTITY)


def test_a_manifest_cannot_point_outside_its_directory(tmp_path):
    recorded(tmp_path / "secret", range(2))
    recorded(tmp_path / "cache", range(2))
    manifest = json.loads((tmp_path / "cache" / MANIFEST).read_text())
    manifest["shards"] = ["../secret/states_00000.safetensors", "states_00001.safetensors"]
    (tmp_path / "cache" / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="missing or damaged"):
        Recording(tmp_path / "cache", IDENTITY)


def test_a_key_depends_on_everything_that_is_asked():
    ids, lengths, rows = torch.arange(8).reshape(2, 4), torch.tensor([4, 4]), torch.tensor([0, 5])
    key = request_key(ids, lengths, rows)
    assert key == request_key(ids.to(torch.int32), lengths.to(torch.int32), rows.to(torch.int32))
    others = [
        (ids + 1, lengths, rows),
        (ids.reshape(1, 8), lengths, rows),
        (ids, torch.tensor([3, 1, 4]), rows),
        (ids, lengths, torch.tensor([0, 6])),
        (ids, torch.tensor([4]), torch.tensor([4, 0, 5])),
    ]
    assert len({key, *(request_key(*other) for other in others)}) == 6
