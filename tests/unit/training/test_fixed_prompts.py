"""Which prompts there are, and how they are gone on with."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from disaggkd_cli.checks.sample import dataset_of
from disaggkd_cli.config import Config
from disaggkd_cli.config.on_policy import OnPolicyConfig
from disaggkd_cli.data import IGNORE, Sequence
from disaggkd_cli.errors import UserError
from disaggkd_cli.on_policy.completions import Completion
from disaggkd_cli.training.fixed_prompts import FixedPrompts, fixed_prompts, prompts_of, write_greedily
from disaggkd_cli.training.samples import FIXED, ON_POLICY, Sample, SamplesTable
from disaggkd_cli.transport import TeachersLost


def config(**changes) -> Config:
    found = Config()
    found.data.sequence_length = 64
    for name, value in changes.items():
        setattr(found.log, name, value)
    return found


def text(first: int, length: int, masked: int = 0, lengths=None) -> Sequence:
    ids = np.arange(first, first + length)
    labels = np.append(ids[1:], IGNORE)
    labels[: max(0, masked - 1)] = IGNORE  # a label stands on the token before the one that is to be said
    return Sequence(ids, labels, lengths or (length,))


def test_running_text_gives_its_beginnings():
    found = prompts_of(config(), dataset_of([text(0, 64), text(100, 9, lengths=(5, 4)), text(200, 64)]), None)
    assert found == [list(range(24)), list(range(100, 105))], "the first document alone, and two of three texts"


def test_what_is_masked_is_the_prompt_whole():
    assert prompts_of(config(samples=1), dataset_of([text(0, 60, masked=30)]), None) == [list(range(30))]


def test_a_long_prompt_keeps_its_end():
    (found,) = prompts_of(config(samples=1, sample_tokens=24), dataset_of([text(0, 64, masked=50)]), None)
    assert found == list(range(10, 50))


def test_the_same_beginning_is_taken_once():
    assert len(prompts_of(config(samples=3), dataset_of([text(0, 30), text(0, 40), text(5, 30)]), None)) == 2


def test_prompts_of_an_on_policy_run_are_those_that_its_student_completes():
    found = config(samples=3)
    found.on_policy = OnPolicyConfig(prompt_tokens=7, max_new_tokens=40)
    texts = [text(0, 64), text(100, 60, masked=30), text(200, 60, masked=20)]
    assert prompts_of(found, dataset_of(texts), None) == [list(range(7)), list(range(200, 220))]


def test_what_was_drawn_stands_beside_the_teachers_words(tmp_path):
    class Words:
        eos_token_id = None

        def decode(self, ids):
            return " ".join(map(str, ids))

    table = SamplesTable(tmp_path / "samples.jsonl", 0)
    fixed = FixedPrompts([[1, 2], [3]], 1, 0, Words(), None, table, ["its words", "more"])
    drawn = [Completion(0, prompt, (8, 9), False, 0.1) for prompt in ((1, 2), (4,), (3,))]
    assert list(fixed.drawn(5, drawn)) == [
        Sample(5, ON_POLICY, "1 2", "teacher", "its words"),
        Sample(5, ON_POLICY, "1 2", "student", "8 9"),
        Sample(5, ON_POLICY, "4", "student", "8 9"),
    ]


def test_own_prompts_must_leave_room():
    def tokenizer(prompt):
        return {"input_ids": list(range(len(prompt.split())))}

    assert prompts_of(config(sample_prompts=["a b", "c"]), None, tokenizer) == [[0, 1], [0]]
    for bad in ("", "word " * 41):
        with pytest.raises(UserError, match="log.sample_prompts"):
            prompts_of(config(sample_prompts=[bad]), None, tokenizer)


def test_each_prompt_goes_on_by_itself_in_batches_of_one_shape():
    """The next id is the sum of all ids before it, so every token that is lost, padded or shifted shows."""
    shapes = set()

    def next_ids(batch):
        shapes.add(tuple(batch.input_ids.shape))
        ends = batch.rows - torch.arange(len(batch.rows)) * batch.input_ids.shape[1]
        return torch.stack([row[: end + 1].sum() for row, end in zip(batch.input_ids, ends, strict=True)])

    assert write_greedily([[1, 2], [3]], 4, 999, next_ids) == [[3, 6, 12, 24], [3, 6, 12, 24]]
    assert write_greedily([[1, 2], [5]], 4, 999, next_ids, frozenset([12])) == [[3, 6], [5, 10, 20, 40]]
    assert shapes == {(2, 6)}


def test_it_ends_once_all_have_ended():
    calls = []

    def next_ids(batch):
        calls.append(batch)
        return torch.full((2,), 7)

    assert write_greedily([[1], [2]], 9, 0, next_ids, frozenset([7])) == [[], []]
    assert len(calls) == 1


def test_a_teacher_that_is_lost_costs_its_texts_only():
    class Lost:
        asks_alone = True

        @contextmanager
        def aside(self, rows):
            raise TeachersLost("no teacher for 5 s")
            yield

    def write(source, path):
        said = []
        tokenizer = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)), eos_token_id=None)
        prompts = FixedPrompts([[1, 2]], 2, 0, tokenizer, None, SamplesTable(path, 0))

        class Student(torch.nn.Module):
            def forward(self, batch, teacher_hidden, num_tokens):
                assert not self.training and teacher_hidden is None
                return torch.tensor([4])

        student = Student().train()
        written = []
        prompts.table.write = written.extend
        prompts.write(3, student, source, torch.device("cpu"), said.append)
        assert student.training
        return said, written

    said, written = write(Lost(), SimpleNamespace(exists=lambda: False))
    assert said == ["samples: the teacher's texts are missing: no teacher for 5 s"]
    assert [(one.writer, one.text) for one in written] == [("student", "4 4")]
    silent = SimpleNamespace(asks_alone=True, aside=lambda rows: None)
    assert "teacher.cache" in write(silent, SimpleNamespace(exists=lambda: False))[0][0]


def test_a_resumed_run_has_the_teachers_texts_on_record(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.distributed.broadcast", lambda tensor, src: None)
    tokenizer = SimpleNamespace(decode=lambda ids: f"from {ids[0]}", eos_token_id=None)
    held_out = dataset_of([text(0, 60), text(7, 60)])
    table = SamplesTable(tmp_path / "samples.jsonl", 4)

    def built(recorded):
        return fixed_prompts(config(), held_out, tokenizer, None, 0, table, recorded, False, print)

    known = [Sample(4, FIXED, f"from {first}", "teacher", f"says {first}") for first in (7, 0)]
    assert built(known).teacher_texts == ["says 0", "says 7"]
    assert built(known[:1]).teacher_texts is None, "a prompt of which nothing is known has all asked again"
    said = []
    assert fixed_prompts(config(), held_out, tokenizer, None, 0, table, known, True, said.append) is None
    assert "shards" in said[0]
    assert fixed_prompts(config(samples=0), held_out, tokenizer, None, 0, table, known, False, said.append) is None
