"""What a run says about its texts."""

import json

import pytest

from disaggkd_cli.config import Config
from disaggkd_cli.data import load_tokenizer, reading_progress
from disaggkd_cli.training.texts import read_texts
from tests.support.runs import TINY_TEACHER


@pytest.fixture
def config(tmp_path):
    for name, count, words in (("a", 60, "she "), ("b", 20, "of the same ")):
        records = [{"prompt": f"it was {i}", "completion": " " + words * (i * 7 % 11 + 1)} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    made = Config()
    made.run_dir = str(tmp_path / "run")
    made.data.train = {"novels": {"path": str(tmp_path / "a.jsonl"), "weight": 3}, "rest": str(tmp_path / "b.jsonl")}
    made.data.eval = 0.1
    made.data.sequence_length = 128
    made.train.steps = 64
    return made


def test_shares_and_padding_are_said(config):
    said = []
    read_texts(config, load_tokenizer(TINY_TEACHER), False, said.append)
    (novels,) = (line for line in said if line.startswith("data.train[novels]: weight 3 of 4, 75.0% of sequences"))
    assert "its 54 sequences come 3.56 times in 64 steps" in novels
    (rest,) = (line for line in said if line.startswith("data.train[rest]: weight 1 of 4, 25.0% of sequences"))
    (padding,) = (line for line in said if "batches hold sequences of similar lengths" in line)
    saved, plain = (float(word.rstrip("%")) for word in padding.split() if word.endswith("%"))
    assert 0 < saved < plain


def test_of_packed_texts_no_padding_is_said(config):
    said = []
    config.data.train = config.data.train["rest"]
    read_texts(config, load_tokenizer(TINY_TEACHER), True, said.append)
    assert not any("similar lengths" in line or "weight" in line for line in said)


def test_a_stream_remembers_in_the_run_directory(config, tmp_path):
    config.data.streaming = True
    config.data.eval = str(tmp_path / "c.jsonl")
    (tmp_path / "c.jsonl").write_text(json.dumps({"prompt": "it", "completion": " was"}) + "\n")
    said = []
    train = read_texts(config, load_tokenizer(TINY_TEACHER), False, said.append).train
    assert any("data.train: streamed" in line for line in said)
    next(iter(train.batches(config.seed, 4, 0)))
    assert (tmp_path / "run" / "stream_0.jsonl").read_text().splitlines()[1].startswith('{"number": 0')


def test_progress_is_said_now_and_then(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(reading_progress.time, "monotonic", lambda: now[0])
    said = []
    with reading_progress.TextsProgress(said.append, bar=True) as progress:
        for documents in range(0, 1400, 100):
            now[0] += 1
            progress("tokenising data.train", documents, documents / 2000)
        now[0] += 9
        progress("laying out", 0, None)
    assert said == [
        "tokenising data.train: 400 documents, 20%", "tokenising data.train: 900 documents, 45%", "laying out"
    ]  # fmt: skip
