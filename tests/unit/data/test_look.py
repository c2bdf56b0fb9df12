"""What `--dry-run` says of the texts."""

import datasets
import pytest
from typer.testing import CliRunner

from disaggkd_cli.cli import app
from disaggkd_cli.config import Config
from disaggkd_cli.data import look_at_texts
from disaggkd_cli.errors import UserError
from tests.support.runs import TINY_TEACHER

from .support import write_jsonl

CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


def data(train, evaluation=0.1, **more):
    config = Config().data
    config.train, config.eval = train, evaluation
    for key, value in more.items():
        setattr(config, key, value)
    return config


def test_each_source_is_opened_and_named(tmp_path):
    chats = write_jsonl(tmp_path / "chats.jsonl", [CHAT] * 9)
    shared = write_jsonl(tmp_path / "shared.jsonl", [{"conversations": [{"from": "human", "value": "q"}]}])
    (tmp_path / "novel.txt").write_text("It is a truth\n" * 9)
    begin = ("It is a truth\n" * 9)[:40]
    sources = {"chats": chats, "shared": shared}
    assert look_at_texts(data(sources, str(tmp_path / "novel.txt"))) == [
        f"data.train[chats]: {chats} (jsonl): the first 5 records are conversations",
        f"data.train[shared]: {shared} (jsonl): the first 1 records are conversations",
        f"data.eval: {tmp_path}/novel.txt (text): begins with {begin!r}",
        "data.train[shared]: records are read as ShareGPT conversations (conversations: human → user, gpt → assistant)",
    ]


def test_what_a_run_would_stumble_over_is_said(tmp_path, monkeypatch):
    bad = write_jsonl(tmp_path / "a.jsonl", [{"question": "q", "answer": "a"}])
    with pytest.raises(UserError, match="a.jsonl line 1: needs text, .* found question, answer"):
        look_at_texts(data(bad))
    columns = {"prompt": "question", "completion": "answer"}
    assert look_at_texts(data(bad, columns=columns))[0].endswith("the first 1 records are prompts with completions")
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, config: ["test"])
    with pytest.raises(UserError, match="data.train: owner/name has no split train; it has test"):
        look_at_texts(data("owner/name"))
    monkeypatch.undo()
    monkeypatch.setattr(datasets, "get_dataset_split_names", unreachable)
    with pytest.raises(UserError, match="data.train: the splits of owner/name can't be asked for .Couldn't reach"):
        look_at_texts(data("owner/name"))


def unreachable(name, config):
    raise ConnectionError(f"Couldn't reach {name} on the Hub")


def test_dry_run_looks_at_the_texts(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(
        f"teacher: {{model: {TINY_TEACHER}}}\nstudent: {{model: {TINY_TEACHER}}}\nrun_dir: {tmp_path}/run\n"
    )
    alpaca = TINY_TEACHER.parent / "records" / "alpaca.jsonl"
    command = ["run", str(config), "--dry-run", "data.eval=0.5", f"data.train={alpaca}"]
    found = CliRunner().invoke(app, command, catch_exceptions=False)
    assert found.exit_code == 0, found.output
    assert "alpaca.jsonl (jsonl): the first 2 records are conversations" in found.output
    assert "records are read in Alpaca's form" in found.output
    bad = write_jsonl(tmp_path / "a.jsonl", [{"question": "q"}])
    with pytest.raises(UserError, match="a.jsonl line 1: needs text"):
        CliRunner().invoke(app, [*command, f"data.train={bad}"], catch_exceptions=False)
