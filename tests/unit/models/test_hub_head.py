"""The head of a teacher with a hub name is read from the cache's files alone, as from a directory."""

import shutil

import huggingface_hub.constants
import pytest
import torch
import transformers.utils.hub as hub

from disaggkd_cli.models import load, load_head_shard, resolve_source
from tests.support.runs import TINY_TEACHER

NAME = "someone/tiny"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A hub's cache, offline, and the snapshot in it that tests fill."""
    root = tmp_path / "hub" / "models--someone--tiny"
    snapshot = root / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "is_offline_mode", lambda: True)
    return snapshot


def head_of(name):
    head, vocabulary = load_head_shard(resolve_source(name), torch.float32, "teacher.model", lambda ids: (3, ids - 2))
    return head.weight, vocabulary


@pytest.mark.parametrize("shards", [False, True], ids=["one file", "shards"])
def test_only_the_head_is_read(cache, monkeypatch, shards):
    if shards:
        from transformers import AutoModelForCausalLM

        AutoModelForCausalLM.from_pretrained(TINY_TEACHER).save_pretrained(cache, max_shard_size="200KB")
        assert len(list(cache.glob("model-*.safetensors"))) > 1
    else:
        for path in TINY_TEACHER.iterdir():
            shutil.copy(path, cache)
    expected = head_of(str(TINY_TEACHER))
    monkeypatch.setattr(load, "load_causal_lm", _whole_unless_empty(load.load_causal_lm))
    weight, vocabulary = head_of(NAME)
    assert torch.equal(weight, expected[0]) and vocabulary == expected[1] == len(weight) + 5


def _whole_unless_empty(original):
    def load_only_empty(source, dtype, key, **options):
        assert options.get("device_map") == "meta", "the whole teacher was loaded"
        return original(source, dtype, key, **options)

    return load_only_empty


def test_other_files_stay_with_their_name(cache):
    source = resolve_source(NAME)
    assert load._in_the_cache(source) is source  # no safetensors files
    shutil.copy(TINY_TEACHER / "model.safetensors", cache)
    trusting = resolve_source(NAME, trust_remote_code=True)
    assert load._in_the_cache(trusting) is trusting
    assert load._in_the_cache(source).directory == cache
    here = resolve_source(str(TINY_TEACHER))
    assert load._in_the_cache(here) is here
