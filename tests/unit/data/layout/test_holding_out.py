import numpy as np
import pytest

from disaggkd_cli.data.layout.flat_documents import join
from disaggkd_cli.data.layout.holding_out import hold_out
from disaggkd_cli.data.layout.micro_batch import IGNORE
from disaggkd_cli.data.notes import Notes
from disaggkd_cli.data.tokenise.encoding import EncodedDocument
from disaggkd_cli.errors import UserError


def documents(*contents, is_text=True):
    return join(EncodedDocument(np.asarray(ids, np.int32), np.ones(len(ids), bool), is_text) for ids in contents)


def contents(docs):
    return [tuple(docs.input_ids[start:end]) for start, end in zip(docs.starts, docs.ends, strict=True)]


def test_whole_documents_are_held_out_and_none_is_on_both_sides():
    all_documents = documents(*([i, i + 1, i + 2] for i in range(100)))
    notes = Notes()
    train, held = hold_out(all_documents, 0.1, 42, notes)
    assert (len(train), len(held)) == (90, 10)
    assert sorted(contents(train) + contents(held)) == sorted(contents(all_documents))
    assert "10 of 100 documents are held out (30 of 300 tokens)" in notes.lines()[0]


def test_the_choice_depends_on_the_seed_and_not_on_the_order():
    forward = documents(*([i, i] for i in range(100)))
    backward = documents(*([i, i] for i in reversed(range(100))))
    chosen = set(contents(hold_out(forward, 0.1, 42, Notes())[1]))
    assert chosen == set(contents(hold_out(backward, 0.1, 42, Notes())[1]))
    assert chosen != set(contents(hold_out(forward, 0.1, 43, Notes())[1]))


@pytest.mark.parametrize("seed", range(20))
def test_copies_of_a_document_are_on_one_side(seed):
    train, held = hold_out(documents(*([i % 10, 5, 6] for i in range(30))), 0.2, seed, Notes())
    assert not set(contents(train)) & set(contents(held))


def test_of_a_few_books_the_last_part_is_held_out_and_its_first_token_is_no_label():
    train, held = hold_out(documents(range(1000), range(2000, 2500)), 0.1, 42, notes := Notes())
    assert contents(train) == [tuple(range(900)), tuple(range(2000, 2450))]
    assert contents(held) == [tuple(range(900, 1000)), tuple(range(2450, 2500))]
    assert train.labels[[898, 899, 900]].tolist() == [899, IGNORE, 2001]
    assert train.labels[-1] == IGNORE
    assert "the last 0.1 of each text is held out (150 of 1500 tokens)" in notes.lines()[0]


def test_of_a_few_conversations_one_is_held_out_whole():
    train, held = hold_out(documents([1, 2], [3, 4, 5], is_text=False), 0.02, 42, Notes())
    assert (len(train), len(held)) == (1, 1)


@pytest.mark.parametrize(
    "all_documents, fraction, match",
    [
        (documents([1, 2], is_text=False), 0.1, "no document is left to train on"),
        (documents([1, 2], [1, 2], [1, 2], is_text=False), 0.3, "no document is left"),
        (documents([1, 2, 3]), 0.1, "too few and too short"),
        (documents([1, 2, 3]), 0.0, "between 0 and 1"),
        (documents([1, 2, 3]), 1.0, "between 0 and 1"),
    ],
)
def test_what_cannot_be_split_is_refused(all_documents, fraction, match):
    with pytest.raises(UserError, match=f"data.eval: .*{match}"):
        hold_out(all_documents, fraction, 42, Notes())
