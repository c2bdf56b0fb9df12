"""A long text in pieces has the ids and the offsets of the whole, whichever record it comes in."""

import random
import string

import numpy as np
import pytest

from disaggkd_cli.data.read.cutting import TextCutter
from disaggkd_cli.data.read.documents import Conversation, PromptCompletion
from disaggkd_cli.data.tokenise import chat, encoding
from disaggkd_cli.data.tokenise.chat import ChatEncoder
from disaggkd_cli.data.tokenise.encoding import DocumentEncoder
from disaggkd_cli.data.tokenise.in_pieces import ids_and_offsets_of, ids_of
from disaggkd_cli.data.tokenise.template import ChatTemplate
from disaggkd_cli.data.tokenise.vocabulary import load_tokenizer
from tests.support.runs import TINY_TEACHER
from tests.unit.data.support import CHATML


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY_TEACHER)


def words(seed, count=2000):
    draw = random.Random(seed)
    letters = string.ascii_lowercase + "éß"
    return " ".join("".join(draw.choices(letters, k=draw.randint(1, 9))) for _ in range(count))


@pytest.mark.parametrize("text", ["", " ", "a", "word " * 999, words(random.randrange(1 << 30))])
def test_ids_and_offsets(tokenizer, text):
    cutter = TextCutter(tokenizer, piece_characters=700)
    whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, offsets = ids_and_offsets_of(text, tokenizer, cutter)
    assert ids.tolist() == whole["input_ids"] == ids_of(text, tokenizer, cutter).tolist()
    assert offsets.tolist() == [list(pair) for pair in whole["offset_mapping"]]


def short_pieces(monkeypatch):
    """Let every cutter cut where it else would not, and count its pieces."""
    cut = []

    class Short(TextCutter):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **{**options, "piece_characters": 700})

        def pieces(self, text):
            found = list(super().pieces(text))
            cut.append(len(found))
            return iter(found)

    monkeypatch.setattr(chat, "TextCutter", Short)
    monkeypatch.setattr(encoding, "TextCutter", Short)
    return cut


def test_records(tokenizer, monkeypatch):
    said = [("user", words(1)), ("assistant", words(2)), ("user", "more"), ("assistant", words(3))]
    talk = Conversation("here", [{"role": role, "content": content} for role, content in said])
    pair = PromptCompletion("x", words(4), words(5))
    template = ChatTemplate(tokenizer, CHATML)
    expected = [*ChatEncoder(template).encode(talk)], DocumentEncoder(tokenizer).encode([pair])[0]
    cut = short_pieces(monkeypatch)
    ids, said = ChatEncoder(template).encode(talk)
    found = DocumentEncoder(tokenizer).encode([pair])[0]
    assert min(cut) > 10
    np.testing.assert_array_equal(ids, expected[0][0])
    np.testing.assert_array_equal(said, expected[0][1])
    np.testing.assert_array_equal(found.input_ids, expected[1].input_ids)
    np.testing.assert_array_equal(found.supervised, expected[1].supervised)
