import numpy as np
import pytest

from disaggkd_cli.data import IGNORE, collate, load_splits
from disaggkd_cli.errors import UserError

from .support import build_byte_tokenizer, data_config, write_jsonl

TEXTS = [{"text": f"{i:03} " + "x" * (i % 23)} for i in range(60)]
CHATS = [
    {"messages": [{"role": "user", "content": f"Q{i}"}, {"role": "assistant", "content": f"A{i}"}]} for i in range(40)
]


def decoded(tokenizer, dataset):
    """Each document of each sequence as text."""
    found = []
    for index in range(len(dataset)):
        sequence = dataset.sequence(index)
        pieces = np.split(sequence.input_ids, np.cumsum(sequence.document_lengths)[:-1])
        found += [tokenizer.decode(piece) for piece in pieces]
    return found


@pytest.mark.parametrize("pack", [True, False])
def test_every_document_is_on_just_one_side_and_whole(tmp_path, byte_tokenizer, pack):
    config = data_config(write_jsonl(tmp_path / "a.jsonl", CHATS), eval=0.25, sequence_length=128)
    splits = load_splits(config, byte_tokenizer, pack=pack, seed=1)
    train, held = decoded(byte_tokenizer, splits.train), decoded(byte_tokenizer, splits.evaluation)
    assert len(held) == 10 and len(set(train + held)) == len(train + held) == 40
    assert all(f"Q{i}<|im_end|>" in "".join(train + held) for i in range(40))
    assert "10 of 40 documents are held out" in splits.evaluation.notes[0]


@pytest.mark.parametrize("pack", [True, False])
def test_sequences_are_consistent(tmp_path, byte_tokenizer, pack):
    config = data_config(write_jsonl(tmp_path / "a.jsonl", TEXTS + CHATS), sequence_length=96)
    for dataset in vars(load_splits(config, byte_tokenizer, pack=pack, seed=1)).values():
        for index in range(len(dataset)):
            sequence = dataset.sequence(index)
            assert sum(sequence.document_lengths) == len(sequence) == len(sequence.labels) <= 96
            assert dataset.supervised_counts[index] == (sequence.labels != IGNORE).sum() > 0
            if not pack:
                assert len(sequence.document_lengths) == 1
            after = np.append(sequence.input_ids[1:], IGNORE)
            kept = sequence.labels[:-1] != IGNORE
            assert (sequence.labels[:-1][kept] == after[:-1][kept]).all()
        assert dataset.input_ids.dtype == dataset.labels.dtype == dataset.supervised_counts.dtype == np.int32
        assert dataset.longest <= 96 and dataset.token_count == len(dataset.input_ids)
        batch = collate([dataset.sequence(index) for index in range(len(dataset))], byte_tokenizer.pad_token_id)
        assert batch.supervised_count == dataset.supervised_counts.sum()
        with pytest.raises(IndexError):
            dataset.sequence(len(dataset))


def test_of_books_nothing_is_lost_but_the_one_label_at_the_cut(tmp_path, byte_tokenizer):
    body = " ".join(str(number) for number in range(1000, 1200))  # 999 characters
    (tmp_path / "a.txt").write_text(body)
    config = data_config(tmp_path / "a.txt", eval=0.1, sequence_length=64)
    splits = load_splits(config, byte_tokenizer, pack=True, seed=1)
    whole = body + "<|im_end|>"
    held = sorted(decoded(byte_tokenizer, splits.evaluation), key=whole.find)
    assert "".join(decoded(byte_tokenizer, splits.train)) + "".join(held) == whole
    assert splits.train.supervised_counts.sum() + splits.evaluation.supervised_counts.sum() == 1000 - 2
    assert "1 of 1 documents are longer than data.sequence_length=64" in splits.train.notes[0]


@pytest.mark.parametrize("pack", [True, False])
def test_rows_without_anything_to_learn_are_left_out(tmp_path, byte_tokenizer, pack):
    # 17 tokens with the end: the last one stands alone in a second row.
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a" * 16}])
    config = data_config(path, eval=write_jsonl(tmp_path / "b.jsonl", [{"text": "b" * 16}]))
    train = load_splits(config, byte_tokenizer, pack=pack, seed=1).train
    assert (len(train), train.token_count, train.supervised_counts.tolist()) == (1, 16, [16])


def test_the_first_sequences_of_evaluation_are_a_sample_of_all_its_files(tmp_path, byte_tokenizer):
    for letter in "abcd":
        (tmp_path / f"{letter}.txt").write_text(letter * 1000)
    config = data_config(tmp_path / "*.txt", eval=0.1)
    evaluation = load_splits(config, byte_tokenizer, pack=True, seed=1).evaluation
    assert len({text[0] for text in decoded(byte_tokenizer, evaluation)[:8]}) > 2
    again = load_splits(config, byte_tokenizer, pack=True, seed=1).evaluation
    assert (again.input_ids == evaluation.input_ids).all()


def test_evaluation_from_a_file_of_its_own(tmp_path, byte_tokenizer):
    config = data_config(
        write_jsonl(tmp_path / "a.jsonl", TEXTS[:50]), eval=write_jsonl(tmp_path / "b.jsonl", TEXTS[50:])
    )
    splits = load_splits(config, byte_tokenizer, pack=True, seed=1)
    assert "".join(decoded(byte_tokenizer, splits.train)).count("<|im_end|>") == 50
    assert "".join(decoded(byte_tokenizer, splits.evaluation)).count("<|im_end|>") == 10
    with pytest.raises(UserError, match="data.eval: .*a.jsonl is trained on as well"):
        overlapping = data_config(tmp_path / "a.jsonl", eval=str(tmp_path / "*.jsonl"))
        load_splits(overlapping, byte_tokenizer, pack=True, seed=1)


def test_the_fingerprint_tells_data_and_settings_apart(tmp_path, byte_tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    other = write_jsonl(tmp_path / "b.jsonl", [*TEXTS[:-1], {"text": "other"}])

    def fingerprint(train=path, tokenizer=byte_tokenizer, pack=True, seed=1, **settings):
        return load_splits(data_config(train, **settings), tokenizer, pack=pack, seed=seed).train.fingerprint

    prints = [
        fingerprint(),
        fingerprint(train=other),
        fingerprint(pack=False),
        fingerprint(seed=2),
        fingerprint(sequence_length=17),
        fingerprint(eval=0.4),
        fingerprint(tokenizer=build_byte_tokenizer(bos=True)),
    ]
    assert len(set(prints)) == len(prints)
    assert fingerprint() == prints[0] and len(prints[0]) == 64


def test_documents_without_anything_to_learn_are_counted_and_if_there_are_no_others_an_error(tmp_path, byte_tokenizer):
    silent = {"messages": [{"role": "user", "content": "Q"}]}
    path = write_jsonl(tmp_path / "a.jsonl", [*TEXTS, silent, {"text": ""}, {"prompt": "P", "completion": ""}])
    notes = load_splits(data_config(path, sequence_length=128), byte_tokenizer, pack=True, seed=1).train.notes
    assert f"data.train: 2 documents without a supervised token are left out (first: {path} line 61)" in notes
    assert f"data.train: 1 completions are empty (first: {path} line 63)" in notes
    path = write_jsonl(tmp_path / "b.jsonl", [silent] * 3)
    with pytest.raises(UserError, match="data.train: no document of .*b.jsonl has a supervised token"):
        load_splits(data_config(path), byte_tokenizer, pack=True, seed=1)


def chats_of_which_some_are_long(long):
    return [{"prompt": f"{i:02}" * (30 if i < long else 1), "completion": "A"} for i in range(40)]


@pytest.mark.parametrize("pack", [True, False])
def test_a_few_prompts_that_do_not_fit_are_left_out_aloud_and_many_are_refused(tmp_path, byte_tokenizer, pack):
    path = write_jsonl(tmp_path / "a.jsonl", chats_of_which_some_are_long(2))
    splits = load_splits(data_config(path), byte_tokenizer, pack=pack, seed=1)
    assert (
        "data.train: 2 of 40 documents are longer than data.sequence_length=16 (longest: 62 tokens): "
        "WARNING, 2 of them (5.0% of all) are LEFT OUT"
    ) in splits.train.notes
    assert len(decoded(byte_tokenizer, splits.train) + decoded(byte_tokenizer, splits.evaluation)) == 38
    path = write_jsonl(tmp_path / "b.jsonl", chats_of_which_some_are_long(3))
    with pytest.raises(UserError, match="3 of 40 documents .* 3 of them are prompts .*data.long_documents"):
        load_splits(data_config(path), byte_tokenizer, pack=pack, seed=1)


def test_long_documents_can_be_dropped_split_or_refused_on_demand(tmp_path, byte_tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", chats_of_which_some_are_long(20))

    def load(policy, path=path):
        return load_splits(data_config(path, long_documents=policy), byte_tokenizer, pack=True, seed=1)

    dropped = load("drop")
    assert len(decoded(byte_tokenizer, dropped.train) + decoded(byte_tokenizer, dropped.evaluation)) == 20
    split = load("split")
    assert "20 of them are prompts with answers, whose later parts lack their prompts" in split.train.notes[0]
    answers = sum(
        (dataset.labels == byte_tokenizer.convert_tokens_to_ids("A")).sum() for dataset in vars(split).values()
    )
    assert answers == 40
    with pytest.raises(UserError, match="20 of 40 documents are longer .*raise data.sequence_length"):
        load("error")
    with pytest.raises(UserError, match="none is left"):
        load("drop", write_jsonl(tmp_path / "b.jsonl", [{"prompt": "x" * 30, "completion": "A"}] * 3))


def test_parts_of_a_split_conversation_stay_on_one_side(tmp_path, byte_tokenizer):
    records = [{"prompt": chr(97 + i) * 40, "completion": chr(97 + i) * 40} for i in range(20)]
    config = data_config(write_jsonl(tmp_path / "a.jsonl", records), long_documents="split")
    splits = load_splits(config, byte_tokenizer, pack=False, seed=1)
    letters = set(range(byte_tokenizer.convert_tokens_to_ids("a"), byte_tokenizer.convert_tokens_to_ids("t") + 1))
    train, held = set(splits.train.input_ids) & letters, set(splits.evaluation.input_ids) & letters
    assert not train & held and len(train | held) == 20


def test_a_chat_template_of_ones_own(tmp_path):
    template = tmp_path / "template.jinja"
    prompt = "{% if add_generation_prompt %}a{% endif %}"
    template.write_text("{% for m in messages %}{{ m.role[0] + m.content }}{% endfor %}" + prompt)
    path = write_jsonl(tmp_path / "a.jsonl", CHATS)
    tokenizer = build_byte_tokenizer(template=None)
    with pytest.raises(UserError, match="line 1: holds messages, but the tokenizer has no chat template"):
        load_splits(data_config(path), tokenizer, pack=True, seed=1)
    splits = load_splits(data_config(path, chat_template=str(template)), tokenizer, pack=True, seed=1)
    assert "uQ7aA7" in "".join(decoded(tokenizer, splits.train) + decoded(tokenizer, splits.evaluation))
    with pytest.raises(UserError, match="data.chat_template: .*nowhere.jinja can't be read"):
        load_splits(data_config(path, chat_template=str(tmp_path / "nowhere.jinja")), tokenizer, pack=True, seed=1)


def test_progress_is_told_and_settings_are_checked(tmp_path, byte_tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    told = []
    load_splits(data_config(path), byte_tokenizer, pack=True, seed=1, progress=lambda *done: told.append(done))
    assert told == [("tokenising data.train", 60, 1.0)]
    for setting, value in {"long_documents": "cut", "records": "chat", "text_documents": "line"}.items():
        with pytest.raises(UserError, match=f"data.{setting}: {value} is none of"):
            load_splits(data_config(path, **{setting: value}), byte_tokenizer, pack=True, seed=1)
    with pytest.raises(UserError, match="data.sequence_length: 1"):
        load_splits(data_config(path, sequence_length=1), byte_tokenizer, pack=True, seed=1)


@pytest.mark.parametrize("pack", [True, False])
def test_what_a_cut_leaves_without_a_supervised_token_is_counted(tmp_path, byte_tokenizer, pack):
    records = [{"prompt": "p" * 70, "completion": "x"}, *[{"prompt": "p", "completion": "x" * 9}] * 3]
    held_out = write_jsonl(tmp_path / "b.jsonl", records[1:2])
    config = data_config(write_jsonl(tmp_path / "a.jsonl", records), eval=held_out, long_documents="split")
    splits = load_splits(config, byte_tokenizer, pack=pack, seed=1)
    (note,) = (note for note in splits.train.notes if "no supervised token" in note)
    assert note.startswith("data.train: WARNING, 4 sequences (64 tokens) are LEFT OUT, since the cut at data.sequence")
    assert not any("no supervised token" in note for note in splits.evaluation.notes)
