"""Tokens kept on disk: the same as without, built once, gone on with, found damaged, shared."""

import json
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from disaggkd_cli.data import load_splits
from disaggkd_cli.data.keep import build, shards
from disaggkd_cli.data.keep.cache import Cache, default_directory
from disaggkd_cli.data.keep.dataset_directory import ARRAYS
from disaggkd_cli.data.tokenise import token_batches
from disaggkd_cli.data.tokenise.encoding import DocumentEncoder
from disaggkd_cli.errors import RunError, UserError

from ..support import build_byte_tokenizer, data_config, write_jsonl

RECORDS = [
    *({"text": f"{i:03} " + "x" * (i % 23)} for i in range(50)),
    *({"prompt": f"P{i}", "completion": f"C{i}" * (i % 5)} for i in range(50)),
    {"text": ""},
]


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n\n".join(json.dumps(record) for record in RECORDS) + "\n")
    return tmp_path / "a.jsonl"


def assert_same(found, expected):
    for split in ("train", "evaluation"):
        mine, theirs = getattr(found, split), getattr(expected, split)
        assert mine.fingerprint == theirs.fingerprint
        for name in ARRAYS:
            assert (getattr(mine, name) == getattr(theirs, name)).all() and len(getattr(mine, name)), name
            assert getattr(mine, name).dtype == getattr(theirs, name).dtype
        assert [note for note in mine.notes if "was damaged (" not in note] == theirs.notes


def entries(cache: Path, kind: str) -> list[Path]:
    return sorted(path for path in cache.glob(f"{kind}-*") if path.is_dir())


@pytest.fixture
def encoded(monkeypatch):
    """Counts the documents that are tokenised."""
    counted = []
    encode = DocumentEncoder.encode
    monkeypatch.setattr(
        DocumentEncoder, "encode", lambda self, documents: counted.extend(documents) or encode(self, documents)
    )
    return counted


@pytest.mark.parametrize("pack", [True, False])
def test_cached_texts_are_those_that_are_read_anew(texts, byte_tokenizer, encoded, tmp_path, pack):
    settings = {"sequence_length": 32, "eval": 0.2}
    expected = load_splits(data_config(texts, **settings), byte_tokenizer, pack=pack, seed=1)
    config = data_config(texts, cache=str(tmp_path / "cache"), **settings)
    assert_same(load_splits(config, byte_tokenizer, pack=pack, seed=1), expected)
    assert len(encoded) == 2 * len(RECORDS)
    again = load_splits(config, byte_tokenizer, pack=pack, seed=1)
    assert_same(again, expected)
    assert len(encoded) == 2 * len(RECORDS)
    assert isinstance(again.train.input_ids.base, np.memmap) and not again.train.input_ids.flags.writeable
    assert any("blank lines" in note for note in again.train.notes)


def test_other_settings_share_the_tokens_and_other_texts_or_tokenizers_do_not(texts, byte_tokenizer, encoded, tmp_path):
    cache = tmp_path / "cache"

    def load(tokenizer=byte_tokenizer, seed=1, **settings):
        return load_splits(data_config(texts, cache=str(cache), **settings), tokenizer, pack=True, seed=seed)

    load(sequence_length=32)
    load(sequence_length=48)
    load(sequence_length=32, seed=2)
    assert len(encoded) == len(RECORDS)
    assert (len(entries(cache, "tokens")), len(entries(cache, "sequences"))) == (1, 3)
    load(build_byte_tokenizer(bos=True), sequence_length=32)
    load(sequence_length=32, records="auto", text_documents="sections")
    assert len(entries(cache, "tokens")) == 3
    texts.write_text(texts.read_text() + json.dumps({"text": "another"}) + "\n")
    changed = load(sequence_length=32)
    assert len(entries(cache, "tokens")) == 4
    assert changed.train.fingerprint != load(sequence_length=48, eval=0.4).train.fingerprint


class Stop(BaseException):
    """The user's Ctrl-C."""


@pytest.mark.parametrize("stops", [[3], [2, 5], [9]])
def test_an_interrupted_build_goes_on_where_its_last_shard_ended(
    texts, byte_tokenizer, encoded, tmp_path, monkeypatch, stops
):
    expected = load_splits(data_config(texts, sequence_length=32), byte_tokenizer, pack=True, seed=1)
    encoded.clear()
    monkeypatch.setattr(token_batches, "_DOCUMENTS_AT_ONCE", 10)
    monkeypatch.setattr(shards, "SHARD_TOKENS", 1)
    config = data_config(texts, sequence_length=32, cache=str(tmp_path / "cache"))
    for stop in stops:
        add = shards.Writer.add
        added = []

        def add_some(self, batch, added=added, add=add, stop=stop):
            added.append(batch)
            if len(added) > stop:
                self._append(batch.documents)  # bytes behind the last shard
                raise Stop
            add(self, batch)

        with monkeypatch.context() as patch, pytest.raises(Stop):
            patch.setattr(shards.Writer, "add", add_some)
            load_splits(config, byte_tokenizer, pack=True, seed=1)
    assert_same(load_splits(config, byte_tokenizer, pack=True, seed=1), expected)
    # Each interruption costs the one batch that it hit.
    assert len(encoded) <= len(RECORDS) + 10 * len(stops)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "hurt",
    [
        lambda tokens, sequences: flip(sequences / "train" / "labels.bin", 40),
        lambda tokens, sequences: (sequences / "evaluation" / "input_ids.bin").write_bytes(b"1234"),
        lambda tokens, sequences: (sequences / "train" / "manifest.json").write_text('{"arrays": '),
        lambda tokens, sequences: (sequences / "train" / "manifest.json").unlink(),
    ],
    ids=["a bit", "a file cut short", "a broken manifest", "no manifest"],
)
def test_damaged_sequences_are_found_said_and_built_anew(texts, byte_tokenizer, encoded, tmp_path, hurt):
    config = data_config(texts, sequence_length=32, cache=str(tmp_path / "cache"))
    expected = load_splits(data_config(texts, sequence_length=32), byte_tokenizer, pack=True, seed=1)
    load_splits(config, byte_tokenizer, pack=True, seed=1)
    encoded.clear()
    hurt(entries(tmp_path / "cache", "tokens")[0], entries(tmp_path / "cache", "sequences")[0])
    found = load_splits(config, byte_tokenizer, pack=True, seed=1)
    assert_same(found, expected)
    assert any("was damaged" in note and "built anew" in note for note in found.train.notes)
    assert not encoded
    assert not any(
        "was damaged (" in note for note in load_splits(config, byte_tokenizer, pack=True, seed=1).train.notes
    )


@pytest.mark.parametrize("file", ["ids.bin", "labels.bin", "lengths.bin", "flags.bin"])
@pytest.mark.parametrize("cut", [False, True])
def test_damaged_tokens_are_found_said_and_built_anew(texts, byte_tokenizer, tmp_path, file, cut):
    config = data_config(texts, sequence_length=32, cache=str(tmp_path / "cache"))
    load_splits(config, byte_tokenizer, pack=True, seed=1)
    path = entries(tmp_path / "cache", "tokens")[0] / file
    if cut:
        path.write_bytes(path.read_bytes()[:-1])
    else:
        flip(path, 8)
    config.sequence_length = 48
    found = load_splits(config, byte_tokenizer, pack=True, seed=1)
    assert_same(found, load_splits(data_config(texts, sequence_length=48), byte_tokenizer, pack=True, seed=1))
    assert any("was damaged" in note for note in found.train.notes)


@pytest.mark.timeout(60)
def test_of_several_that_want_the_same_one_builds_and_the_others_wait(texts, byte_tokenizer, tmp_path, monkeypatch):
    expected = load_splits(data_config(texts, sequence_length=32), byte_tokenizer, pack=True, seed=1)
    config = data_config(texts, sequence_length=32, cache=str(tmp_path / "cache"))
    go_on, builds, found = threading.Event(), [], []
    tokenise = build.tokenise

    def slow(*arguments):
        builds.append(arguments)
        assert go_on.wait(30)
        yield from tokenise(*arguments)

    def wait_is_told(what, documents, share):
        if "waiting for it" in what and "process " in what and " on " in what:  # it has signed by then
            go_on.set()

    monkeypatch.setattr(build, "tokenise", slow)
    threads = [
        threading.Thread(
            target=lambda: found.append(load_splits(config, byte_tokenizer, pack=True, seed=1, progress=wait_is_told))
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1 and len(found) == 3
    for splits in found:
        assert_same(splits, expected)


@pytest.mark.timeout(60)
def test_waiting_for_somebody_who_does_not_get_on_ends(tmp_path):
    cache = Cache(tmp_path / "cache", silence=0.4)
    entry = cache.entry("tokens", ["facts"])
    with cache.locked(entry, "tokenising", lambda: False) as lock:
        lock.sign("tokenising data.train", 7, 0.5)
        with pytest.raises(RunError, match=r"waited for process \d+ on .*tokenising data.train.* no sign of life"):
            with cache.locked(entry, "tokenising", lambda: False):
                pass
        start = time.monotonic()
        with cache.locked(entry, "tokenising", lambda: time.monotonic() > start + 0.3) as other:
            assert other is None


@pytest.mark.timeout(60)
def test_who_waits_in_its_turn_gives_signs_of_life_to_those_who_wait_for_it(tmp_path):
    cache = Cache(tmp_path / "cache")
    outer, inner = cache.entry("sequences", 1), cache.entry("tokens", 1)
    with cache.locked(outer, "laying out", lambda: False) as held, cache.locked(inner, "", lambda: False) as other:
        other.sign("tokenising data.train", 7, 0.5)
        with cache.locked(
            inner, "", lambda: '"documents": 7' in outer.with_name(outer.name + ".lock").read_text(), held
        ) as lock:
            assert lock is None
        assert json.loads(outer.with_name(outer.name + ".lock").read_text())["documents"] == 7


def test_a_full_disk_is_said_and_finished_shards_are_gone_on_with(texts, byte_tokenizer, tmp_path):
    config = data_config(texts, sequence_length=32, cache=str(tmp_path / "cache"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
        with pytest.raises(UserError, match="data.cache: no room left in .*data.cache=null"):
            load_splits(config, byte_tokenizer, pack=True, seed=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    expected = load_splits(data_config(texts, sequence_length=32), byte_tokenizer, pack=True, seed=1)
    assert_same(load_splits(config, byte_tokenizer, pack=True, seed=1), expected)
    assert not list((tmp_path / "cache").glob("*.part"))


def test_where_the_cache_is(texts, byte_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_directory() == tmp_path / "xdg" / "disaggkd"
    load_splits(data_config(texts, cache="auto"), byte_tokenizer, pack=True, seed=1)
    assert not (tmp_path / "xdg").exists()  # a few kilobytes are not worth it
    monkeypatch.setattr("disaggkd_cli.data.splits.WORTH_CACHING", 100)
    load_splits(data_config(texts, cache="auto"), byte_tokenizer, pack=True, seed=1)
    assert entries(tmp_path / "xdg" / "disaggkd", "sequences")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_directory() == tmp_path / "home" / ".cache" / "disaggkd"
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="data.cache: .*file/cache can't be written to"):
        load_splits(data_config(texts, cache=str(tmp_path / "file" / "cache")), byte_tokenizer, pack=True, seed=1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
    notes = load_splits(data_config(texts, cache="auto"), byte_tokenizer, pack=True, seed=1).train.notes
    assert "nothing is kept for the next run" in notes[0]


def test_two_sources_through_the_cache(tmp_path, byte_tokenizer):
    first = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"P{i}", "completion": "a" * (i % 7 + 1)} for i in range(60)])
    second = write_jsonl(
        tmp_path / "b.jsonl", [{"prompt": f"P{i}", "completion": "b" * (i % 5 + 1)} for i in range(40)]
    )
    train = [{"path": first, "weight": 3}, {"path": second}]

    def load(**settings):
        config = data_config("", sequence_length=32, **settings)
        config.train = train
        return load_splits(config, byte_tokenizer, pack=False, seed=1)

    expected = load(eval=0.2)
    assert expected.train.source_sizes == (48, 32) and expected.train.weights == (3, 1)
    assert expected.train.names == ("1", "2") and expected.train.length_bucketing
    assert sum("12 of 60 documents are held out" in note for note in expected.evaluation.notes) == 1
    found = load(eval=0.2, cache=str(tmp_path / "cache"))
    assert_same(found, expected)
    for dataset in (found.train, load(eval=0.2, cache=str(tmp_path / "cache")).train):
        assert (dataset.source_sizes, dataset.weights, dataset.names) == ((48, 32), (3, 1), ("1", "2"))
    train[0]["weight"] = 2
    assert load(eval=0.2).train.fingerprint != expected.train.fingerprint


@pytest.mark.timeout(120)
def test_worker_processes_give_the_same(texts, byte_tokenizer, monkeypatch):
    monkeypatch.setattr(token_batches, "_DOCUMENTS_AT_ONCE", 10)
    expected = load_splits(data_config(texts, sequence_length=32), byte_tokenizer, pack=True, seed=1)
    found = load_splits(data_config(texts, sequence_length=32, workers=2), byte_tokenizer, pack=True, seed=1)
    assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_worker_processes_pass_on_what_is_wrong(tmp_path):
    chats = [{"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}]
    wrong = write_jsonl(tmp_path / "b.jsonl", chats)
    with pytest.raises(UserError, match="line 1: holds messages, but the tokenizer has no chat template"):
        load_splits(data_config(wrong, workers=2), build_byte_tokenizer(template=None), pack=True, seed=1)


BUILDER = """
import sys
from types import SimpleNamespace
from disaggkd_cli.data import load_splits
from disaggkd_cli.data.keep import shards
from disaggkd_cli.data.tokenise import token_batches
from tests.unit.data.support import build_byte_tokenizer

token_batches._DOCUMENTS_AT_ONCE = 10
shards.SHARD_TOKENS = 1
add = shards.Writer.add

def add_and_hang(self, batch):
    add(self, batch)
    if self.documents == 50:
        self._append(batch.documents)  # bytes behind the last shard
        print("half", flush=True)
        sys.stdin.read()

shards.Writer.add = add_and_hang
text, cache = sys.argv[1:]
config = SimpleNamespace(train=text, eval=0.5, format="auto", sequence_length=32, cache=cache)
load_splits(config, build_byte_tokenizer(), pack=True, seed=1)
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_killed_builder_leaves_its_lock_and_its_finished_shards(texts, byte_tokenizer, encoded, tmp_path):
    arguments = [sys.executable, "-c", BUILDER, str(texts), str(tmp_path / "cache")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as builder:
        assert builder.stdout.readline() == "half\n"
        builder.kill()
    config = data_config(texts, sequence_length=32, cache=str(tmp_path / "cache"))
    found = load_splits(config, byte_tokenizer, pack=True, seed=1)
    assert len(encoded) == len(RECORDS) - 50
    assert_same(found, load_splits(data_config(texts, sequence_length=32), byte_tokenizer, pack=True, seed=1))
