"""Prompts without an answer: what the student writes whole runs on, and nothing else may."""

import numpy as np
import pytest

from disaggkd_cli.data import IGNORE, load_splits
from disaggkd_cli.data.look import look_at_texts
from disaggkd_cli.data.read.documents import Conversation, PromptCompletion
from disaggkd_cli.data.read.records import RecordForm
from disaggkd_cli.data.tokenise.encoding import DocumentEncoder
from disaggkd_cli.errors import UserError
from disaggkd_cli.on_policy.prompts import prompt_of

from .support import build_byte_tokenizer, data_config, write_jsonl

ASKED = [{"role": "user", "content": "q"}]
TURNS = [*ASKED, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "why"}]
ANSWERED = [{"prompt": f"say {number}", "completion": "yes"} for number in range(4)]


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize(
    ("record", "prompt"),
    [
        ({"prompt": "Once upon"}, "Once upon"),
        ({"prompt": "Once", "completion": None}, "Once"),
        ({"prompt": "P"}, "P"),
        (
            {"prompt": ASKED},
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            {"messages": TURNS},
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nq<|im_end|>\n"
            "<|im_start|>assistant\nyes<|im_end|>\n"
            "<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
)
def test_the_whole_prompt_is_asked(tmp_path, record, prompt, bos):
    tokenizer = build_byte_tokenizer(bos=bos)
    asked = write_jsonl(tmp_path / "asked.jsonl", [record] * 3)
    held = write_jsonl(tmp_path / "held.jsonl", ANSWERED)
    config = data_config(asked, eval=held, sequence_length=160)
    splits = load_splits(config, tokenizer, pack=False, seed=1, prompts=True)
    sequence = splits.train.sequence(0)
    found = prompt_of(sequence, 1).tolist()  # prompt_tokens is for running text only, but for a prompt of one token
    expected = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    if bos and isinstance(record.get("prompt"), str):
        expected = [tokenizer.bos_token_id, *expected]
    assert found == expected
    assert np.flatnonzero(sequence.labels != IGNORE).tolist() == [len(found) - 1]
    assert any("3 records are prompts alone" in note for note in splits.train.notes)


def test_elsewhere_they_are_refused_and_told_how(tmp_path):
    asked = write_jsonl(tmp_path / "asked.jsonl", [{"prompt": "P"}] * 40)
    held = write_jsonl(tmp_path / "held.jsonl", ANSWERED)
    tokenizer = build_byte_tokenizer()
    with pytest.raises(UserError, match="asked.jsonl line 1: needs text, .*only trained on with on_policy.fraction=1"):
        load_splits(data_config(asked, eval=held), tokenizer, pack=False, seed=1)
    with pytest.raises(UserError, match="line 1: needs completion .data.records=prompt_completion.*fraction=1"):
        load_splits(data_config(asked, eval=held, records="prompt_completion"), tokenizer, pack=False, seed=1)
    with pytest.raises(UserError, match="asked.jsonl line 1: needs text, .*never held out"):
        load_splits(data_config(held, eval=asked), tokenizer, pack=False, seed=1, prompts=True)
    with pytest.raises(UserError, match="data.eval: is a fraction of data.train, in which 40 records are prompts"):
        load_splits(data_config(asked, eval=0.1), tokenizer, pack=False, seed=1, prompts=True)
    questions = write_jsonl(tmp_path / "questions.jsonl", [{"messages": ASKED}] * 4)
    with pytest.raises(UserError, match="data.train: no document .*on_policy.fraction=1"):
        load_splits(data_config(questions, eval=held), tokenizer, pack=False, seed=1)


def test_a_conversation_that_ends_with_an_answer_is_one_as_ever():
    said = [*ASKED, {"role": "assistant", "content": "yes"}]
    for form in (RecordForm(), RecordForm(prompts=True)):
        assert form.document({"messages": said}, "here")[0] == Conversation("here", said)
        assert form.document(ANSWERED[0], "here")[0] == PromptCompletion("here", "say 0", "yes")
    assert RecordForm().document({"messages": TURNS}, "here")[0] == Conversation("here", TURNS)


def test_what_asks_nothing_is_refused():
    with pytest.raises(UserError, match="here: prompt has no completion and ends with a message of assistant"):
        RecordForm(prompts=True).document({"prompt": TURNS[:2]}, "here")
    (refused,) = DocumentEncoder(build_byte_tokenizer()).encode([PromptCompletion("here", "", None)])
    assert "here: the prompt is empty" in str(refused)


def test_a_look_says_what_they_are(tmp_path):
    held = write_jsonl(tmp_path / "held.jsonl", ANSWERED)
    for record, said in (
        ({"prompt": "P"}, "prompts to be completed"),
        ({"messages": ASKED}, "conversations to be answered"),
    ):
        path = write_jsonl(tmp_path / "asked.jsonl", [record])
        assert look_at_texts(data_config(path, eval=held, columns={}), prompts=True)[0].endswith(f"records are {said}")


def test_kept_tokens_of_one_reading_are_not_those_of_the_other(tmp_path):
    chats = write_jsonl(tmp_path / "chats.jsonl", [{"messages": TURNS}] * 3)
    held = write_jsonl(tmp_path / "held.jsonl", ANSWERED)
    config = data_config(chats, eval=held, cache=str(tmp_path / "kept"), sequence_length=160)
    tokenizer = build_byte_tokenizer()
    counts = [
        int(load_splits(config, tokenizer, pack=False, seed=1, prompts=prompts).train.supervised_counts[0])
        for prompts in (False, True)
    ]
    assert counts == [len("yes<|im_end|>") - len("<|im_end|>") + 1, 1]
