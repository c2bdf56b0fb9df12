"""A stream: one fixed order, all of it once an epoch, gone on with from any step."""

import json
from itertools import islice

import numpy as np
import pytest

from disaggkd_cli.data import IGNORE, load_splits
from disaggkd_cli.data.stream import streaming
from disaggkd_cli.data.stream.window_index import StreamIndex, WindowStart
from disaggkd_cli.data.tokenise import token_batches
from disaggkd_cli.errors import UserError

from ..support import build_byte_tokenizer, data_config, write_jsonl

RECORDS = [{"prompt": f"{i:03}", "completion": "x" * (i * 7 % 11 + 1)} for i in range(100)]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(token_batches, "_DOCUMENTS_AT_ONCE", 4)


@pytest.fixture
def held_out(tmp_path):
    return write_jsonl(tmp_path / "held_out.jsonl", [{"prompt": "P", "completion": "held out"}] * 3)


def load(train, held_out, pack=False, tokenizer=None, **settings):
    config = data_config("", eval=held_out, sequence_length=24, streaming=True, shuffle_tokens=150, **settings)
    config.train = train
    return load_splits(config, tokenizer or build_byte_tokenizer(), pack=pack, seed=5).train


def contents(batches):
    """Token ids and labels of each batch."""
    return [
        [(tuple(each.input_ids.tolist()), tuple(each.labels.tolist())) for each in batch.sequences(0, 5)]
        for batch in batches
    ]


@pytest.fixture(params=["plain", "by length", "packed", "mixed", "mixed by length"])
def train(request, tmp_path, held_out):
    """A stream, as a function that opens it anew."""
    kind = request.param
    path = write_jsonl(tmp_path / "a.jsonl", RECORDS)
    other = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "b", "completion": "y" * (i + 1)} for i in range(9)])
    mixed = [{"path": path, "weight": 3}, {"path": other, "weight": 1}]
    return lambda: load(
        mixed if "mixed" in kind else path, held_out, pack=kind == "packed", length_bucketing="by length" in kind
    )


def test_a_stream_is_the_same_from_every_step_on(train, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "WINDOW_BATCHES", 4)
    whole = contents(islice(train().batches(5, 5, 0), 60))
    assert len({sequence for batch in whole for sequence in batch}) > 40
    remembering = train()
    remembering.remember_in(tmp_path / "run", write=True)
    assert contents(islice(remembering.batches(5, 5, 0), 30)) == whole[:30]
    for step in (1, 7, 29, 41):
        assert contents(islice(train().batches(5, 5, step), 10)) == whole[step : step + 10]
        resumed = train()
        resumed.remember_in(tmp_path / "run", write=True)
        assert contents(islice(resumed.batches(5, 5, step), 10)) == whole[step : step + 10]


def test_every_document_comes_once_in_every_epoch(tmp_path, held_out):
    train = load(write_jsonl(tmp_path / "a.jsonl", RECORDS), held_out, length_bucketing=False)
    stream = [sequence for batch in contents(islice(train.batches(5, 5, 0), 60)) for sequence in batch]
    epochs = [stream[start : start + 100] for start in (0, 100, 200)]
    assert all(len(set(epoch)) == 100 for epoch in epochs)
    assert set(epochs[0]) == set(epochs[1]) and epochs[0] != epochs[1]
    assert sorted(epochs[0][:8]) != sorted(epochs[0])[:8]


def test_weights_are_kept_in_every_round(tmp_path, held_out):
    sources = {
        "a": {"path": write_jsonl(tmp_path / "a.jsonl", RECORDS), "weight": 3},
        "b": {"path": write_jsonl(tmp_path / "b.jsonl", [{"prompt": "b", "completion": "y"}] * 3)},
    }
    train = load(sources, held_out, length_bucketing=False)
    letter = build_byte_tokenizer().convert_tokens_to_ids("b")
    stream = [sequence for batch in contents(islice(train.batches(5, 5, 0), 80)) for sequence in batch]
    from_second = np.asarray([ids[0] == letter for ids, _ in stream])
    assert (from_second.reshape(-1, 4).sum(axis=1) == 1).all()


def test_reading_on_reads_only_what_is_new(tmp_path, held_out, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", RECORDS)
    starts = []
    tokenise = streaming.tokenise

    def noting(source, encoder, at):
        starts.append(at)
        return tokenise(source, encoder, at)

    for step in (0, 15):
        train = load(path, held_out, length_bucketing=False)
        train.remember_in(tmp_path / "run", write=True)
        monkeypatch.setattr(streaming, "tokenise", noting)
        list(islice(train.batches(5, 5, step), 18 - step))
        monkeypatch.setattr(streaming, "tokenise", tokenise)
    assert starts[0] == (0, (0, 0)) and starts[-1][1][0] > 0.5 * (tmp_path / "a.jsonl").stat().st_size


def test_the_index_survives_a_torn_line_and_is_not_taken_for_another_streams(tmp_path):
    path = tmp_path / "stream.jsonl"
    index = StreamIndex(path, "this", write=True)
    starts = [WindowStart()]
    for number in range(3):
        index.remember(starts[-1])
        starts.append(starts[-1].after(10, (0, (100 * number, number))))
    assert index.find(25) == starts[2] and index.find(9) == starts[0]
    with path.open("a") as file:
        file.write('{"number": 3, "pos')
    again = StreamIndex(path, "this", write=True)
    assert [again.find(sequence) for sequence in (0, 10, 25, 99)] == [starts[0], starts[1], starts[2], starts[2]]
    again.remember(starts[3])
    assert StreamIndex(path, "another", write=False).find(25) == WindowStart()
    StreamIndex(path, "another", write=True)
    assert StreamIndex(path, "this", write=False).find(25) == WindowStart()


def test_what_is_checked_at_first_is_checked_in_every_window(tmp_path, held_out):
    train = load(write_jsonl(tmp_path / "a.jsonl", RECORDS), held_out)
    seen = []

    def check(ids, labels):
        seen.append((ids != IGNORE).sum())
        if len(seen) > 3:
            raise UserError("an id that the teacher does not know")

    train.verify(check)
    assert train.whole is None and len(seen) == 1
    with pytest.raises(UserError, match="does not know"):
        list(islice(train.batches(5, 5, 0), 60))


def test_what_is_wrong_with_a_stream_is_said(tmp_path, held_out, caplog):
    with pytest.raises(UserError, match="data.eval: a stream is not read to its end"):
        load(write_jsonl(tmp_path / "a.jsonl", RECORDS), 0.1)
    with pytest.raises(UserError, match="data.train: no document of .*b.jsonl has a supervised token"):
        load(write_jsonl(tmp_path / "b.jsonl", [{"text": ""}]), held_out)
    records = [*RECORDS, {"prompt": "long" * 20, "completion": "A"}]
    train = load(write_jsonl(tmp_path / "c.jsonl", records), held_out)
    with caplog.at_level("INFO", "disaggkd"):
        list(islice(train.batches(5, 5, 0), 25))
    assert "WARNING, 1 of them" in caplog.text
    (tmp_path / "c.jsonl").write_text("\n".join(json.dumps(record) for record in records) + "\nnot json\n")
    with pytest.raises(UserError, match="line 102: not JSON"):
        list(islice(load(str(tmp_path / "c.jsonl"), held_out).batches(5, 5, 0), 25))


def test_the_fingerprint_tells_streams_apart(tmp_path, held_out):
    path = write_jsonl(tmp_path / "a.jsonl", RECORDS)
    prints = [load(path, held_out).fingerprint, load(path, held_out, pack=True).fingerprint]
    write_jsonl(tmp_path / "a.jsonl", [*RECORDS, RECORDS[0]])
    prints.append(load(path, held_out).fingerprint)
    assert len(set(prints)) == 3
