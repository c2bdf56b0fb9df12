"""Long texts in pieces: the same tokens as in one, from any place on."""

import json
import shutil
from pydoc_data.topics import topics

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from disaggkd_cli.data import load_splits, load_tokenizer
from disaggkd_cli.data.notes import Notes
from disaggkd_cli.data.read import cutting
from disaggkd_cli.data.read.cutting import TextCutter
from disaggkd_cli.data.read.finding import Source, Wanted, find_sources
from disaggkd_cli.data.read.readers import read_items
from disaggkd_cli.data.tokenise import token_batches
from tests.support.runs import TINY_TEACHER

from ..support import build_byte_tokenizer, build_word_tokenizer, data_config

TEXT = "\n\n".join(topics[name] for name in sorted(topics)[:40])


@pytest.fixture(scope="module")
def real_tokenizer():
    return load_tokenizer(TINY_TEACHER)


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


@pytest.mark.parametrize("size", [300, 999, 20_000])
@pytest.mark.parametrize("ends", ["\n", "\r\n", " "])
def test_the_pieces_of_a_text_are_tokenised_as_the_whole(real_tokenizer, size, ends):
    text = TEXT.replace("\n", ends)
    pieces = list(TextCutter(real_tokenizer, piece_characters=size).pieces(text))
    assert "".join(pieces) == text
    assert len(pieces) > len(text) // (3 * size)
    assert sum((ids(real_tokenizer, piece) for piece in pieces), []) == ids(real_tokenizer, text)


def test_a_place_where_a_token_would_reach_over_is_passed_by():
    joins = build_byte_tokenizer(merges=[("a", "Ġ")])
    text = "x b a " * 400
    pieces = list(TextCutter(joins, piece_characters=9).pieces(text))
    assert len(pieces) > 10 and not any(piece.endswith("a") for piece in pieces)
    assert sum((ids(joins, piece) for piece in pieces), []) == ids(joins, text)


def test_a_text_that_can_not_be_cut_stays_whole():
    words = build_word_tokenizer()
    assert list(TextCutter(words, piece_characters=5).pieces("a b c d " * 20)) == ["a b c d " * 20]
    assert list(TextCutter(build_byte_tokenizer(), piece_characters=5).pieces("1" * 60)) == ["1" * 60]
    assert list(TextCutter(build_byte_tokenizer(), False, piece_characters=5).pieces("a b " * 20)) == ["a b " * 20]


@pytest.mark.parametrize("body", [TEXT, "\ufeff" + TEXT.replace("\n", "\r\n"), "é ñ\r\n" * 9000, "x " * 3])
def test_a_text_file_read_in_pieces_is_the_file_from_any_place_on(tmp_path, real_tokenizer, body, monkeypatch):
    monkeypatch.setattr("disaggkd_cli.data.read.readers._BYTES_AT_ONCE", 777)
    path = tmp_path / "a.txt"
    path.write_bytes(body.encode())
    source, cutter = Source(path, "text"), TextCutter(real_tokenizer, piece_characters=3000)
    (whole,) = read_items(source, "data.train", Notes())
    items = list(read_items(source, "data.train", Notes(), cutter=cutter))
    assert "".join(item.document.text for item in items) == whole.document.text
    assert [item.document.begins for item in items] == [True] + [False] * (len(items) - 1)
    assert [item.document.ends for item in items] == [False] * (len(items) - 1) + [True]
    for number in range(1, len(items), max(1, len(items) // 5)):
        start = items[number - 1].following
        assert list(read_items(source, "data.train", Notes(), start=start, cutter=cutter)) == items[number:]


@pytest.mark.parametrize("where", ["file", "record"])
def test_sequences_of_a_text_in_pieces_are_those_of_the_whole(tmp_path, real_tokenizer, monkeypatch, where):
    path = tmp_path / ("a.txt" if where == "file" else "a.jsonl")
    if where == "file":
        path.write_text(TEXT)
    else:
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("a short one", TEXT, "and an end")))
    expected = load_splits(data_config(path, eval=0.1, sequence_length=64), real_tokenizer, pack=True, seed=1)
    monkeypatch.setattr(cutting, "PIECE_CHARACTERS", 3000)
    monkeypatch.setattr(TextCutter.__init__, "__defaults__", (True, 3000))
    monkeypatch.setattr(token_batches, "_CHARACTERS_AT_ONCE", 10_000)
    for cache in (None, str(tmp_path / "cache")):
        config = data_config(path, eval=0.1, sequence_length=64, cache=cache)
        found = load_splits(config, real_tokenizer, pack=True, seed=1)
        for split in ("train", "evaluation"):
            mine, theirs = getattr(found, split), getattr(expected, split)
            assert mine.fingerprint == theirs.fingerprint
            assert (mine.labels == theirs.labels).all() and np.array_equal(mine.sequence_ends, theirs.sequence_ends)


def test_inner_progress_of_one_long_text(tmp_path, real_tokenizer, monkeypatch):
    (tmp_path / "a.txt").write_text(TEXT)
    monkeypatch.setattr(TextCutter.__init__, "__defaults__", (True, 3000))
    monkeypatch.setattr(token_batches, "_CHARACTERS_AT_ONCE", 10_000)
    told = []
    config = data_config(tmp_path / "a.txt", eval=0.1)
    load_splits(config, real_tokenizer, pack=True, seed=1, progress=lambda *done: told.append(done[2]))
    assert len(told) > 10 and told == sorted(told) and told[-1] == 1.0


def test_every_kind_of_file_is_read_from_any_place_on(tmp_path):
    texts = [f"text {number}" for number in range(25)]
    (tmp_path / "a.jsonl").write_text("\n\n".join(json.dumps({"text": text}) for text in texts))
    (tmp_path / "a.txt").write_text("\n\n".join(texts))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet", row_group_size=4)
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "set")
    (tmp_path / "a.json").write_text(json.dumps([{"text": text} for text in texts], indent=1))
    (tmp_path / "a.csv").write_text("text,other\n" + "".join(f"{text},1\n" for text in texts))
    shutil.copy(next((tmp_path / "set").glob("*.arrow")), tmp_path / "stream.arrow")
    table = pyarrow.table({"text": texts})
    with pyarrow.ipc.new_file(tmp_path / "file.arrow", table.schema) as writer:
        writer.write_table(table)
    for ending, kind in ((".gz", "gzip"), (".zst", "zstd"), (".bz2", "bz2")):
        with pyarrow.CompressedOutputStream(str(tmp_path / f"a.jsonl{ending}"), kind) as stream:
            stream.write((tmp_path / "a.jsonl").read_bytes())
    names = {path.name: path for path in tmp_path.iterdir()}
    assert len(names) == 11
    for path in names.values():
        (source,) = find_sources(Wanted(str(path), "data.train"), Notes())
        items = list(read_items(source, "data.train", Notes(), text_documents="sections"))
        assert [item.document.text for item in items] == texts
        for number, item in enumerate(items, 1):
            rest = read_items(source, "data.train", Notes(), text_documents="sections", start=item.following)
            assert [each.document for each in rest] == [each.document for each in items[number:]]
