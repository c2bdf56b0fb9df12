"""What is supervised, from a file to a padded micro-batch, against what a person would mark.

Each expectation is the batch's text as it stands in memory, with what the student is asked to predict in ⟦ ⟧, and `·`
for padding.
"""

import json

import pytest

from disaggkd_cli.data import IGNORE, collate, load_splits
from disaggkd_cli.errors import UserError

from ..support import CHATML, CHATML_WITH_MARKERS, build_byte_tokenizer, data_config, write_jsonl

PAIR = {"prompt": "Q:", "completion": "A"}


def marked(batch, row, tokenizer):
    """A row as text; each label must be the token that follows it."""
    text, inside = "", False
    ids, labels = batch.input_ids[row].tolist(), batch.labels[row].tolist()
    padding = len(ids) - batch.row_lengths[row]
    for place, token in enumerate(ids):
        predicted = place > 0 and labels[place - 1] != IGNORE
        if predicted:
            assert labels[place - 1] == token
        if predicted != inside:
            text += "⟧" if inside else "⟦"
            inside = predicted
        text += "·" if place >= len(ids) - padding else tokenizer.decode([token])
    assert labels[-1] == IGNORE
    return text + ("⟧" if inside else "")


def rows(tmp_path, records, tokenizer, **settings):
    path = write_jsonl(tmp_path / "a.jsonl", records)
    held_out = write_jsonl(tmp_path / "b.jsonl", [PAIR])
    config = data_config(path, eval=held_out, **{"sequence_length": 400, **settings})
    train = load_splits(config, tokenizer, pack=False, seed=1).train
    batch = collate([train.sequence(index) for index in range(len(train))], tokenizer.pad_token_id)
    return [marked(batch, row, tokenizer) for row in range(len(train))]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_on_the_right_and_silent_whatever_side_the_tokenizer_pads_and_though_pad_is_the_end(tmp_path, side):
    tokenizer = build_byte_tokenizer()
    tokenizer.padding_side = tokenizer.truncation_side = side
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    records = [PAIR, {"prompt": "P", "completion": "<|im_end|>"}, {"text": "abcd"}, {"prompt": "", "completion": "xyz"}]
    assert rows(tmp_path, records, tokenizer) == [
        "Q:⟦A<|im_end|>⟧·",
        "P⟦<|im_end|>⟧···",
        "a⟦bcd<|im_end|>⟧",
        "x⟦yz<|im_end|>⟧·",
    ]


@pytest.mark.parametrize("template", [CHATML, CHATML_WITH_MARKERS], ids=["without markers", "with markers"])
def test_answers_of_one_token_and_of_none_in_several_turns(tmp_path, template):
    tokenizer = build_byte_tokenizer(template=template)
    turns = [("system", "S"), ("user", "Q"), ("assistant", "A"), ("user", "R"), ("assistant", ""), ("user", "T")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert rows(tmp_path, [{"messages": messages}, {"messages": messages[:3]}], tokenizer) == [
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n⟦A<|im_end|>⟧\n"
        "<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\n⟦<|im_end|>⟧\n<|im_start|>user\nT<|im_end|>\n",
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n⟦A<|im_end|>⟧\n"
        + "·" * (9 + 13 + 9),  # the turns of R, of nothing, and of T
    ]


def test_tool_calls_are_said_by_the_assistant_and_what_tools_answer_is_not(tmp_path):
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [{"name": "f"}, {"name": "g"}]},
        {"role": "tool", "content": "7"},
        {"role": "tool", "content": "8"},
        {"role": "assistant", "content": "15"},
    ]
    tokenizer = build_byte_tokenizer()
    assert rows(tmp_path, [{"messages": messages, "tools": json.dumps([{"name": "f"}])}], tokenizer) == [
        '<|im_start|>tools\n[{"name": "f"}]<|im_end|>\n<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n'
        '<|im_start|>assistant\n⟦Let me see.<call>{"name": "f"}</call><call>{"name": "g"}</call><|im_end|>⟧\n'
        "<|im_start|>tool\n7<|im_end|>\n<|im_start|>tool\n8<|im_end|>\n<|im_start|>assistant\n⟦15<|im_end|>⟧\n"
    ]


def test_a_prompt_longer_than_the_limit_is_dropped_or_cut_or_refused_and_its_prompt_never_counts(tmp_path):
    tokenizer = build_byte_tokenizer()
    records = [{"prompt": "p" * 12, "completion": "abc"}, *[PAIR] * 30]
    kept = rows(tmp_path, records, tokenizer, sequence_length=8)
    assert kept == ["Q:⟦A<|im_end|>⟧"] * 30
    # Cut: a row of prompt alone has nothing to learn and is left out; its last token still asks for nothing.
    split = rows(tmp_path, records, tokenizer, sequence_length=8, long_documents="split")
    assert split[0] == "pppp⟦abc<|im_end|>⟧" and len(split) == 31
    with pytest.raises(UserError, match="1 of 31 documents are longer than data.sequence_length=8"):
        rows(tmp_path, records, tokenizer, sequence_length=8, long_documents="error")
