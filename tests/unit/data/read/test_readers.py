import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from disaggkd_cli.data.notes import Notes
from disaggkd_cli.data.read.documents import Conversation, PromptCompletion, Text
from disaggkd_cli.data.read.finding import Wanted, find_sources
from disaggkd_cli.data.read.readers import read_documents
from disaggkd_cli.data.read.records import RecordForm
from disaggkd_cli.errors import UserError

from ..support import write_jsonl

CHAT = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]


def read(value, format="auto", notes=None, **options):
    notes = notes or Notes()
    sources = find_sources(Wanted(str(value), "data.train", format), notes)
    return [document for source in sources for document in read_documents(source, "data.train", notes, **options)]


def write_parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_a_text_file_is_one_document_and_keeps_every_character(tmp_path):
    body = "One.\n\n  Two,\nstill two.\n\n\nThree — é\n"
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + body.replace("\n", "\r\n").encode())
    assert read(tmp_path / "a.txt") == [Text(str(tmp_path / "a.txt"), body)]


def test_or_each_section_between_blank_lines_is(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\n\nOne.\n \t\nTwo,\n  still two.\n\n\n\nThree\n\n")
    found = read(path, text_documents="sections")
    assert [document.text for document in found] == ["One.", "Two,\n  still two.", "Three"]
    lines = path.read_text().split("\n")
    for document in found:
        assert lines[int(document.where.rsplit(" ", 1)[1]) - 1] == document.text.split("\n")[0]


def test_json_lines_hold_all_three_kinds(tmp_path):
    path = write_jsonl(
        tmp_path / "a.jsonl",
        [
            {"text": "T", "id": 3},
            {"prompt": "P", "completion": "C"},
            {"messages": CHAT},
            {"messages": CHAT, "tools": "[]"},
        ],
    )
    assert read(path) == [
        Text(f"{path} line 1", "T"),
        PromptCompletion(f"{path} line 2", "P", "C"),
        Conversation(f"{path} line 3", CHAT),
        Conversation(f"{path} line 4", CHAT),
    ]


def test_blank_lines_are_passed_over_and_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n  \n{"text": "b"}\n')
    notes = Notes()
    assert [document.where for document in read(path, notes=notes)] == [f"{path} line 1", f"{path} line 4"]
    assert notes.lines() == [f"2 blank lines among the JSON lines were passed over (first: {path} line 2)"]


def test_parquet_rows_without_the_nulls_that_tables_add(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    rows = [{"messages": [*CHAT, call], "other": 1}, {"messages": CHAT, "other": 2}]
    path = write_parquet(tmp_path / "a.parquet", rows)
    first, second = read(path)
    assert first == Conversation(f"{path} row 1", [*CHAT, call])
    assert second == Conversation(f"{path} row 2", CHAT)


def test_a_dataset_directory_and_one_split_of_several(tmp_path):
    texts = datasets.Dataset.from_dict({"text": [f"t{i}" for i in range(2000)], "id": list(range(2000))})
    texts.save_to_disk(tmp_path / "one")
    assert [document.text for document in read(tmp_path / "one")] == [f"t{i}" for i in range(2000)]
    datasets.DatasetDict({"train": texts, "test": texts}).save_to_disk(tmp_path / "several")
    assert len(read(tmp_path / "several" / "test")) == 2000
    assert len(read(tmp_path / "several")) == 2000
    datasets.DatasetDict({"one": texts, "test": texts}).save_to_disk(tmp_path / "others")
    with pytest.raises(UserError, match="has no split train; name one of one, test with split"):
        read(tmp_path / "others")


def test_a_filtered_dataset_is_read_in_its_own_order(tmp_path):
    texts = datasets.Dataset.from_dict({"text": list("abcdef")}).select([5, 1, 3])
    texts.save_to_disk(tmp_path / "d")
    assert [document.text for document in read(tmp_path / "d")] == ["f", "b", "d"]


def test_directories_and_globs_are_read_in_the_order_of_their_names(tmp_path):
    for name in ("b.txt", "a.txt", "sub/c.txt", ".hidden.txt", ".git/x.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "README.md").write_text("not data")
    notes = Notes()
    assert [document.text for document in read(tmp_path, notes=notes)] == ["a.txt", "b.txt", "sub/c.txt"]
    assert "1 files" in notes.lines()[0] and "README.md" in notes.lines()[0]
    assert [document.text for document in read(tmp_path / "[ab].txt")] == ["a.txt", "b.txt"]
    assert [document.text for document in read(tmp_path / "*.md", format="text")] == ["not data"]
    assert [document.text for document in read(tmp_path / "**" / "c.txt")] == ["sub/c.txt"]


def test_pythons_reference_is_there_without_any_file():
    topics = read("builtin:pydoc")
    assert len(topics) > 50 and all(isinstance(topic, Text) and topic.text.strip() for topic in topics)
    assert topics == sorted(topics, key=lambda topic: topic.where)


@pytest.mark.parametrize(
    "line, match",
    [
        ("{", "line 2: not JSON, .*Each line must be one whole JSON object"),
        ('{"text": "a"', r"line 2: not JSON, .* at column 13: '\{\"text\": \"a\"'"),
        ("[1]", "line 2: expected a JSON object, found list"),
        ("{}", "line 2: needs text, or prompt and completion, .* output; found no key at all"),
        ('{"prompt": "P"}', "line 2: needs text, .*; found prompt"),
        ('{"text": null}', r"line 2: needs text, .*\(null: text\)"),
        ('{"text": 3}', "line 2: text must be a string, not int"),
        ('{"prompt": [], "completion": "C"}', "line 2: prompt and completion must both be texts, or both be lists"),
        ('{"text": "a", "messages": []}', "line 2: could be read as text or as messages; .*data.records=messages"),
        ('{"messages": []}', "line 2: messages must be a list with at least one message"),
        ('{"messages": "hi"}', "line 2: messages must be a list of objects"),
        ('{"messages": [{"content": "a"}]}', "line 2: message 1 must be an object with a role"),
        ('{"messages": [{"role": "user"}]}', r"line 2: message 1 \(user\) has neither content nor tool_calls"),
        (
            '{"messages": [{"role": "user", "content": [1]}]}',
            "line 2: each part of the content of message 1 must be an object with a type",
        ),
        ('{"messages": [{"role": "u", "content": "a"}], "tools": "{"}', "line 2: tools is a string that is not JSON"),
        ("[" * 100_000, "line 2: JSON that is nested too deeply"),
    ],
)
def test_a_broken_line_is_named_by_file_and_number(tmp_path, line, match):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(UserError, match=f"^{path} {match}"):
        read(path)


def test_records_says_how_to_read_what_could_be_read_in_two_ways():
    record = {"text": "T", "prompt": "P", "completion": "C", "messages": CHAT}
    assert RecordForm("text").document(record, "here")[0] == Text("here", "T")
    assert RecordForm("prompt_completion").document(record, "here")[0] == PromptCompletion("here", "P", "C")
    assert RecordForm("messages").document(record, "here")[0] == Conversation("here", CHAT)
    with pytest.raises(UserError, match="here: needs completion .data.records=prompt_completion.; found prompt"):
        RecordForm("prompt_completion").document({"prompt": "P"}, "here")


def test_a_document_of_json_over_many_lines_is_recognised(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"data": [{"text": "a"}]}, indent=1))
    with pytest.raises(UserError, match="line 1: not JSON.*one JSON document over many lines"):
        read(path)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize("content", ["", " \n\n"])
def test_an_empty_file_is_an_error(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=f"data.train: {tmp_path / name} is empty: it holds no document"):
        read(tmp_path / name)


def test_tables_without_rows_or_known_columns_are_errors(tmp_path):
    empty = pyarrow.table({"text": pyarrow.array([], pyarrow.string())})
    pyarrow.parquet.write_table(empty, tmp_path / "empty.parquet")
    with pytest.raises(UserError, match="empty.parquet is empty"):
        read(tmp_path / "empty.parquet")
    with pytest.raises(UserError, match=r"none of the columns text, .*; it has \['question'\]"):
        read(write_parquet(tmp_path / "a.parquet", [{"question": "?"}]))
    datasets.Dataset.from_dict({"question": ["?"]}).save_to_disk(tmp_path / "d")
    with pytest.raises(UserError, match=r"none of the columns text, .*; it has \['question'\]"):
        read(tmp_path / "d")
    (tmp_path / "b.parquet").write_text("no")
    with pytest.raises(UserError, match="b.parquet can't be read as Parquet"):
        read(tmp_path / "b.parquet")
    (tmp_path / "d" / "state.json").write_text("{")
    with pytest.raises(UserError, match="can't be read as a Hugging Face dataset directory"):
        read(tmp_path / "d")


def test_bytes_that_are_not_utf_8_are_named_by_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\ntwo \xe9\n")
    with pytest.raises(UserError, match="a.txt line 2: not UTF-8 .byte 0xe9"):
        read(tmp_path / "a.txt")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xe9"}\n')
    with pytest.raises(UserError, match="a.jsonl line 2: not UTF-8"):
        read(tmp_path / "a.jsonl")


def test_sources_that_are_not_there_or_not_clear(tmp_path):
    (tmp_path / "novels").mkdir()
    (tmp_path / "novels" / "a.txt").write_text("a")
    with pytest.raises(UserError, match=f"no file, .*novel .did you mean {tmp_path / 'novels'}"):
        read(tmp_path / "novel")
    with pytest.raises(UserError, match="no file, directory or glob match"):
        read(tmp_path / "novels" / "*.jsonl")
    with pytest.raises(UserError, match="builtin:wikipedia is not known; there is builtin:pydoc"):
        read("builtin:wikipedia")
    with pytest.raises(UserError, match="data.format: excel is none of auto, text"):
        read(tmp_path / "novels", format="excel")
    (tmp_path / "novels" / "a.jsonl").write_text("{}")
    with pytest.raises(UserError, match="several formats .jsonl: a.jsonl, text: a.txt."):
        read(tmp_path / "novels")
    assert [document.text for document in read(tmp_path / "novels", format="text")] == ["a"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.xls").write_text("a,b")
    with pytest.raises(UserError, match="holds no file that can be read .it holds a.xls."):
        read(tmp_path / "other")
    with pytest.raises(UserError, match="the ending of .*a.xls says nothing about its format"):
        read(tmp_path / "other" / "a.xls")
    (tmp_path / "hub").mkdir()
    for split in ("train", "test"):
        write_parquet(tmp_path / "hub" / f"{split}-00000-of-00001.parquet", [{"text": split}])
    assert [document.text for document in read(tmp_path / "hub" / "train*.parquet")] == ["train"]
