"""Records and files as people have them, each with what is right (tests/assets/records)."""

import json
import shutil

import datasets
import pytest

from disaggkd_cli.data import load_splits, load_tokenizer
from disaggkd_cli.data.notes import Notes
from disaggkd_cli.data.read.documents import Conversation, PromptCompletion, Text
from disaggkd_cli.data.read.finding import Wanted, find_sources
from disaggkd_cli.data.read.readers import read_documents
from disaggkd_cli.data.read.records import RecordForm
from disaggkd_cli.data.tokenise.encoding import DocumentEncoder
from disaggkd_cli.errors import UserError
from tests.support.runs import TINY_TEACHER

from .support import CHATML, build_byte_tokenizer, data_config, write_jsonl
from .tokenise import templates

RECORDS = TINY_TEACHER.parent / "records"
ASK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]


@pytest.fixture(scope="module")
def tokenizer():
    made = build_byte_tokenizer()
    extra = [*templates.TOKENS, "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    made.add_special_tokens({"extra_special_tokens": [each for each in extra if "im_" not in each]})
    return made


@pytest.fixture(scope="module")
def real_tokenizer():
    return load_tokenizer(TINY_TEACHER)


def documents(path, notes=None, format="auto", **form):
    notes = notes or Notes()
    (source,) = find_sources(Wanted(str(path), "data.train", format), notes)
    return list(read_documents(source, "data.train", notes, RecordForm(**form)))


def supervised(tokenizer, template, name):
    """What counts of each document of a file, and the notes."""
    encoder = DocumentEncoder(tokenizer, template)
    encoded = encoder.encode(documents(RECORDS / name))
    return [tokenizer.decode(each.input_ids[each.supervised]) for each in encoded]


def test_the_assistant_first(tokenizer):
    assert supervised(tokenizer, CHATML, "assistant_first.jsonl") == ["Hello!<|im_end|>yes<|im_end|>"]


def test_begin_and_end_tokens_that_a_text_has_already(tokenizer):
    tokenizer = build_byte_tokenizer(bos=True)
    tokens = ["<|begin_of_text|>", "<|eot_id|>"]
    tokenizer.add_special_tokens({"bos_token": tokens[0], "eos_token": tokens[1]})
    from tokenizers import processors

    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A",
        special_tokens=[("<|begin_of_text|>", tokenizer.convert_tokens_to_ids("<|begin_of_text|>"))],
    )
    encoder = DocumentEncoder(tokenizer)
    assert encoder.start_ids == [tokenizer.bos_token_id]
    (pair,) = documents(RECORDS / "begin_token_in_prompt.jsonl")
    for document, ends in (
        (pair, 2),
        (Text("here", "<|begin_of_text|>yes<|eot_id|>\n"), 1),
        (Text("here", "yes"), 1),
        (PromptCompletion("here", "", "<|begin_of_text|>yes"), 1),
    ):
        (encoded,) = encoder.encode([document])
        text = tokenizer.decode(encoded.input_ids)
        assert text.count("<|begin_of_text|>") == 1 and text.startswith("<|begin_of_text|>")
        assert text.count("<|eot_id|>") == ends and text.rstrip().endswith("<|eot_id|>")
        assert tokenizer.decode(encoded.input_ids[encoded.supervised]).strip().count("<|eot_id|>") == 1


def test_contents_in_parts(tokenizer):
    for template in (CHATML, templates.ONLY_PARTS, templates.ONLY_TEXTS):
        assert supervised(tokenizer, template, "content_in_parts.jsonl") == ["yes<|im_end|>"]


def test_several_turns_with_thoughts_and_tools(tokenizer):
    drops = templates.DROPS_THOUGHTS
    assert supervised(tokenizer, drops, "multi_turn.jsonl") == ["yes<|im_end|>\n</think>\n\nno<|im_end|>"]
    assert supervised(tokenizer, drops, "thoughts_multi_turn.jsonl") == ["yes<|im_end|>t\n</think>\n\nno<|im_end|>"]
    called = '\n</think>\n\n<call>w {"city": "Paris"}</call><|im_end|>\n</think>\n\ndone<|im_end|>'
    assert supervised(tokenizer, drops, "tool_calls.jsonl") == [called]


def test_a_weight_of_nothing(tokenizer):
    assert supervised(tokenizer, CHATML, "weight_of_a_message.jsonl") == ["no<|im_end|>"]
    (document,) = documents(RECORDS / "weight_of_a_message.jsonl")
    assert document.untrained == {1} and not any("weight" in message for message in document.messages)


@pytest.mark.parametrize("key", [{"weight": 0}, {"train": False}, {"loss_mask": 0}])
def test_each_way_to_leave_a_turn_out(tmp_path, key):
    chat = [*ASK, {"role": "user", "content": "r", "loss_mask": 0}, {"role": "assistant", "content": "no", **key}]
    (document,) = documents(write_jsonl(tmp_path / "a.jsonl", [{"messages": chat}]))
    assert document.untrained == {3}


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "assistant", "content": "x", "weight": 0.5}, "weight of message 1 is 0.5; it must be 0 or 1"),
        ({"role": "user", "content": "x", "train": True}, r"message 1 \(user\) has train: true"),
        ({"role": "user", "content": [{"type": "image"}]}, "has a part of type image; only text"),
        ({"role": "assistant", "tool_calls": [{"id": 1}]}, "tool_calls of message 1 must be a list"),
    ],
)
def test_messages_that_ask_for_what_there_is_not(tmp_path, message, reason):
    with pytest.raises(UserError, match=f"line 1: .*{reason}"):
        documents(write_jsonl(tmp_path / "a.jsonl", [{"messages": [message]}]))


def test_one_conversation_in_nine_that_is_not_rendered_is_too_many_and_one_in_thirty_is_left_out(tokenizer, tmp_path):
    lines = (RECORDS / "one_refused_of_nine.jsonl").read_text().splitlines()
    template = tmp_path / "template.jinja"
    template.write_text(templates.ONLY_TEXTS)
    settings = {"chat_template": str(template), "sequence_length": 256}
    config = data_config(RECORDS / "one_refused_of_nine.jsonl", **settings)
    reason = r"one_refused_of_nine.jsonl line 9: the chat template does not render the tool calls of message 2"
    with pytest.raises(UserError, match=f"data.train: 1 of 9 documents can't be used; the first: .*{reason}"):
        load_splits(config, tokenizer, pack=False, seed=1)
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([*lines[:-1] * 4, lines[-1]]))
    splits = load_splits(data_config(path, **settings), tokenizer, pack=False, seed=1)
    (note,) = (note for note in splits.train.notes if "LEFT OUT" in note)
    assert note.startswith("data.train: WARNING, 1 documents can't be used") and "a.jsonl line 33" in note
    assert len(splits.train) + len(splits.evaluation) == 32
    # With a template that renders tool calls none is refused.
    template.write_text(templates.DROPS_THOUGHTS)
    assert len(load_splits(config, tokenizer, pack=False, seed=1).train) > 0


def test_other_forms_of_records_are_named_in_the_log():
    notes = Notes()
    (shared,) = documents(RECORDS / "sharegpt.jsonl", notes)
    assert shared.messages == [{"role": "system", "content": "Be brief."}, *ASK]
    first, second = documents(RECORDS / "alpaca.jsonl", notes)
    assert [message["content"] for message in first.messages] == ["Name a colour.", "Blue."]
    assert [message["content"] for message in second.messages] == ["Add.\n2 and 3", "5"]
    assert [line.split(" (")[0] for line in notes.lines()] == [
        "data.train: records are read as ShareGPT conversations",
        "data.train: records are read in Alpaca's form",
    ]
    (pair,) = documents(RECORDS / "conversational_pair.jsonl")
    assert pair.messages == ASK and not pair.untrained
    assert [document.text for document in documents(RECORDS / "array.json")] == ["one", "two"]


def test_of_a_conversational_prompt_nothing_is_learned(tmp_path):
    record = {
        "prompt": [*ASK, {"role": "user", "content": "r"}],
        "completion": [{"role": "assistant", "content": "no"}],
    }
    (pair,) = documents(write_jsonl(tmp_path / "a.jsonl", [record]))
    assert len(pair.messages) == 4 and pair.untrained == {1}


def test_functions_in_sharegpt(tmp_path):
    turns = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "w", "arguments": {"city": "Paris"}}'},
        {"from": "observation", "value": "A"},
        {"from": "gpt", "value": "done", "weight": 0},
    ]
    record = {"conversations": turns, "tools": '[{"name": "w"}]', "system": "S"}
    (document,) = documents(write_jsonl(tmp_path / "a.jsonl", [record]))
    assert [message["role"] for message in document.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert document.messages[2]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}
    assert document.tools == [{"name": "w"}] and document.untrained == {4}
    with pytest.raises(UserError, match="turn 1 is from 'narrator', which is nobody known"):
        documents(write_jsonl(tmp_path / "b.jsonl", [{"conversations": [{"from": "narrator", "value": "x"}]}]))


def test_messages_as_json_text_and_variables_of_a_record(tmp_path, tokenizer):
    record = {"messages": json.dumps(ASK), "chat_template_kwargs": {"enable_thinking": False}}
    (document,) = documents(write_jsonl(tmp_path / "a.jsonl", [record]))
    assert document == Conversation(f"{tmp_path}/a.jsonl line 1", ASK, None, frozenset(), {"enable_thinking": False})
    (encoded,) = DocumentEncoder(tokenizer, templates.DROPS_THOUGHTS).encode([document])
    assert tokenizer.decode(encoded.input_ids[encoded.supervised]) == "yes<|im_end|>"
    (pair,) = documents(write_jsonl(tmp_path / "b.jsonl", [{"prompt": "[1, 2]", "completion": '{"a": 1}'}]))
    assert (pair.prompt, pair.completion) == ("[1, 2]", '{"a": 1}')


def test_columns_of_other_names(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "q", "answer": "yes", "prompt": "another"}])
    columns = {"prompt": "question", "completion": "answer"}
    assert documents(path, columns=columns) == [PromptCompletion(f"{path} line 1", "q", "yes")]
    datasets.Dataset.from_json(path).to_parquet(tmp_path / "a.parquet")
    (row,) = documents(tmp_path / "a.parquet", columns=columns)
    assert (row.prompt, row.completion) == ("q", "yes")
    with pytest.raises(
        UserError, match="line 1: has no reply, which data.columns names; found question, answer, prompt"
    ):
        documents(path, columns={"completion": "reply"})
    with pytest.raises(UserError, match=r"found question, answer, prompt. Other names: data.columns"):
        documents(path)


def test_csv_cells_come_through_as_they_are(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('\ufeffprompt,completion,id\r\n"a, b",007,1\r\nnull,NA,2\r\n"two\nlines","say ""x""",3\r\n')
    pairs = [(each.prompt, each.completion) for each in documents(path)]
    assert pairs == [("a, b", "007"), ("null", "NA"), ("two\nlines", 'say "x"')]
    assert documents(path)[2].where == f"{path} line 4"
    (tmp_path / "a.tsv").write_text("prompt\tcompletion\na, b\tc\n")
    assert [(each.prompt, each.completion) for each in documents(tmp_path / "a.tsv")] == [("a, b", "c")]
    for text, reason in (
        ("text\none,two\n", "line 2: has 2 cells, but the first line names 1 columns"),
        ('text\n"one\n', "line 2: not CSV"),
        ("body\none\n", "has none of the columns text"),
        ("text\n", "is empty"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=reason):
            documents(path)
    path.write_bytes(b"text\n\xe9\n")
    with pytest.raises(UserError, match="not UTF-8 .byte 0xe9"):
        documents(path)


def test_compressed_files_that_are_none_or_do_not_say_so(tmp_path):
    import gzip

    text = b'{"text": "x"}\n' * 500
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(text))
    with pytest.raises(UserError, match=r"a.jsonl is compressed \(gzip\); its name must end in .gz"):
        documents(tmp_path / "a.jsonl")
    for name, body in (("b.jsonl.gz", text), ("c.jsonl.gz", gzip.compress(text)[:40])):
        (tmp_path / name).write_bytes(body)
        with pytest.raises(UserError, match=f"{name} can't be read"):
            documents(tmp_path / name)
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"one\n"))
    assert [each.text for each in documents(tmp_path / "d.txt.gz")] == ["one\n"]


def test_a_data_set_on_the_hub_by_its_name(tmp_path, byte_tokenizer, monkeypatch):
    def load_dataset(name, config=None, split=None):
        asked.append((name, config, split))
        if name != "owner/name":
            raise FileNotFoundError(f"Couldn't find any data file at {name}")
        return datasets.Dataset.from_list([{"text": f"{split} {number}"} for number in range(12)])

    asked = []
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, config: ["train", "test", "validation"])
    monkeypatch.chdir(tmp_path)
    config = data_config("", eval="split", sequence_length=32)
    config.train = {"path": "owner/name", "config": "main"}
    splits = load_splits(config, byte_tokenizer, pack=False, seed=1)
    assert {*asked} == {("owner/name", "main", "train"), ("owner/name", "main", "validation")}
    assert len(splits.train) == len(splits.evaluation) == 12
    config.train = "owner/other"
    config.eval = 0.5
    with pytest.raises(
        UserError, match="data.train: owner/other can't be read as a file here, nor as a data set on the"
    ):
        load_splits(config, byte_tokenizer, pack=False, seed=1)


@pytest.fixture
def folder(tmp_path):
    for split, names in {"train": ["a", "b"], "test": ["c"], "validation": ["d"]}.items():
        (tmp_path / "d" / split).mkdir(parents=True)
        for name in names:
            write_jsonl(tmp_path / "d" / split / f"{name}.jsonl", [{"text": f"{split} {name}"}] * 3)
    return tmp_path / "d"


def texts(tokenizer, dataset):
    return {tokenizer.decode(dataset.sequence(index).input_ids) for index in range(len(dataset))}


def test_folders_named_after_splits(folder, byte_tokenizer):
    splits = load_splits(data_config(folder, eval="split", sequence_length=64), byte_tokenizer, pack=False, seed=1)
    assert texts(byte_tokenizer, splits.train) == {"train a<|im_end|>", "train b<|im_end|>"}
    assert texts(byte_tokenizer, splits.evaluation) == {"validation d<|im_end|>"}
    assert any("2 files of" in note and "are of other splits" in note for note in splits.train.notes)
    shutil.rmtree(folder / "validation")
    splits = load_splits(data_config(folder, eval="split", sequence_length=64), byte_tokenizer, pack=False, seed=1)
    assert texts(byte_tokenizer, splits.evaluation) == {"test c<|im_end|>"}
    named = data_config("", eval={"path": str(folder), "split": "test"}, sequence_length=64)
    named.train = [{"path": str(folder), "weight": 1}]
    assert texts(byte_tokenizer, load_splits(named, byte_tokenizer, pack=False, seed=1).evaluation) == {
        "test c<|im_end|>"
    }
    shutil.rmtree(folder / "test")
    with pytest.raises(UserError, match="data.eval=split: no source of data.train has a held-out split"):
        load_splits(data_config(folder, eval="split", sequence_length=64), byte_tokenizer, pack=False, seed=1)


@pytest.mark.parametrize(
    ("names", "trained"),
    [
        (["train.jsonl", "test.jsonl"], ["train.jsonl"]),
        (["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "dev.jsonl"], 2),
        (["chats_train.jsonl", "chats_test.jsonl", "other.jsonl"], ["chats_train.jsonl"]),
        (["a.jsonl", "b.jsonl", "eval.jsonl"], ["a.jsonl", "b.jsonl"]),
        (["contest.jsonl", "trainer.jsonl", "latest-news.jsonl"], 3),
        (["x/val/a.jsonl", "x/b.jsonl"], ["x/b.jsonl"]),
    ],
)
def test_files_named_after_splits(tmp_path, names, trained):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(tmp_path / name, [{"text": "x"}])
    for value in (tmp_path, f"{tmp_path}/**/*.jsonl"):
        found = [source.path for source in find_sources(Wanted(str(value), "data.train"), Notes())]
        if isinstance(trained, int):
            assert len(found) == trained
        else:
            assert found == [tmp_path / name for name in trained]


def test_a_folder_of_nothing_but_a_held_out_split_is_not_trained_on_unasked(tmp_path):
    write_jsonl(tmp_path / "test.jsonl", [{"text": "x"}])
    with pytest.raises(UserError, match=r"holds only texts to be held out \(test\); .* name the files"):
        find_sources(Wanted(str(tmp_path), "data.train"), Notes())
    assert len(find_sources(Wanted(f"{tmp_path}/test*", "data.train"), Notes())) == 1


@pytest.mark.parametrize("kind", ["text", "completion", "chat", "without spaces"])
def test_a_line_of_a_megabyte_comes_through_whole(tmp_path, real_tokenizer, kind):
    long = "It was a truth universally acknowledged. " * 25_000
    record = {
        "text": {"text": long},
        "completion": {"prompt": "Go on:", "completion": long},
        "chat": {"messages": [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": long}]},
        "without spaces": {"text": "0123456789abcdef" * 60_000},
    }[kind]
    path = write_jsonl(tmp_path / "a.jsonl", [record])
    template = tmp_path / "template.jinja"
    template.write_text(templates.ONLY_TEXTS)
    held_out = write_jsonl(tmp_path / "b.jsonl", [{"text": "Held out."}])
    config = data_config(path, eval=held_out, sequence_length=512, long_documents="split", chat_template=str(template))
    train = load_splits(config, real_tokenizer, pack=True, seed=1).train
    assert train.token_count > 150_000 and train.supervised_counts.sum() > 0.99 * train.token_count
    texts = [real_tokenizer.decode(train.input_ids)]
    assert (long if kind != "without spaces" else record["text"]) in "".join(texts)
