"""Batches wait for their window, checkpoints carry what is not trained on, and what is missing is named."""

import threading

import numpy as np
import pytest

from disaggkd_cli.config import Config, check
from disaggkd_cli.config.on_policy import OnPolicyConfig
from disaggkd_cli.data.layout.dataset import TokenizedDataset
from disaggkd_cli.errors import UserError
from disaggkd_cli.on_policy.completions import Completion
from disaggkd_cli.on_policy.texts import OnPolicyTexts
from disaggkd_cli.training.on_policy import on_policy_dataset

SIZE = 4


def dataset(lengths=(5, 6, 7, 8, 9)) -> TokenizedDataset:
    """Running texts whose first id is their number."""
    ends = np.cumsum(lengths)
    ids = np.concatenate([np.full(length, number, np.int32) for number, length in enumerate(lengths)])
    labels = np.full(len(ids), 5, np.int32)
    labels[ends - 1] = -100
    counts = np.asarray(lengths, np.int32) - 1
    return TokenizedDataset(
        ids, labels, ends, np.asarray(lengths, np.int32), np.arange(len(lengths) + 1), counts, "f", []
    )


def texts(fraction=0.5, every=1, lag=1, steps=6) -> OnPolicyTexts:
    section = OnPolicyConfig(fraction=fraction, every=every, lag=lag, prompt_tokens=3)
    return OnPolicyTexts(dataset(), section, 1, SIZE, steps)


def written(found: OnPolicyTexts, window: int) -> list[Completion]:
    return [Completion(place.position, (1, 2), (7, 8), False, 0.5) for place in found.places(window)]


def test_a_batch_waits_for_its_window_and_replaces_a_share():
    found = texts()
    batches = found.batches(1, SIZE, 0)
    got = []
    reader = threading.Thread(target=lambda: got.append(next(batches)), daemon=True)
    reader.start()
    reader.join(0.05)
    assert not got
    found.add(0, written(found, 0))
    reader.join(10)
    sequences = got[0].sequences(0, SIZE)
    assert [one.written for one in sequences] == [False, True, False, True]
    given = dataset().supervised_counts[[int(one.input_ids[0]) for one in sequences if not one.written]]
    assert got[0].supervised_rows == sum(given) + 2 * 2
    assert got[0].sequences(3, 9)[0].input_ids.tolist() == [1, 2, 7, 8]


def test_closing_lets_a_reader_go():
    found = texts()
    ended = threading.Event()
    threading.Thread(target=lambda: (list(found.batches(1, SIZE, 0)), ended.set()), daemon=True).start()
    found.close()
    assert ended.wait(10)


def test_prompts_are_beginnings_of_what_stands_there():
    found = texts(fraction=1.0)
    (batch,) = [found.prompt(place) for place in found.places(0)][:1]
    assert len(batch) == 3 and len(set(batch)) == 1


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("fraction", [0.1, 0.5])
def test_a_resumed_run_writes_what_the_first_would_have_written(every, lag, fraction):
    for stop in range(1, 6):
        first, again = texts(fraction, every, lag), texts(fraction, every, lag)
        for done in range(stop):
            for window in first.due(done):
                first.add(window, written(first, window))
        again.restore(stop, first.kept(stop), "checkpoint")
        for done in range(stop, 6):
            assert first.due(done) == again.due(done)
            for window in first.due(done):
                first.add(window, written(first, window))
                again.add(window, written(again, window))
            assert first.of_step(done) == again.of_step(done)
            assert next(again.batches(1, SIZE, done)).supervised_rows


def test_a_checkpoint_that_lacks_texts_is_refused():
    first = texts(lag=1)
    for window in first.due(0):
        first.add(window, written(first, window))
    with pytest.raises(UserError, match="here: lacks 1 of the texts"):
        texts(lag=1).restore(1, first.kept(1)[1:], "here")


def test_another_window_is_not_taken_for_this_one():
    found = texts()
    with pytest.raises(ValueError, match="window 1"):
        found.add(1, written(found, 0))


def test_texts_without_room_are_left_out_of_the_data():
    config = Config()
    config.on_policy = OnPolicyConfig(max_new_tokens=4, prompt_tokens=9)
    config.data.sequence_length = 12
    lines = []
    found = on_policy_dataset(config, dataset([5] * 39 + [11]), lines.append)
    assert len(found) == 39 and found.token_count == 39 * 5 and "1 of 40" in lines[0]
    assert found.fingerprint != "f" and found.sequence(38).input_ids.tolist() == [38] * 5


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("on_policy.fraction", {"fraction": 1.5}),
        ("on_policy.top_p", {"top_p": 0.0}),
        ("on_policy.temperature", {"temperature": 0.0}),
        ("on_policy.lag", {"lag": -1}),
        ("on_policy.every", {"every": 0}),
        ("on_policy.max_new_tokens", {"max_new_tokens": 512}),
        ("on_policy.writers", {"writers": "generators"}),
        ("on_policy.writers", {"writers": "teacher"}),
        ("data.packing", {"packing": "on"}),
        ("data.streaming", {"streaming": True}),
        ("teacher.cache", {"cache": "recorded"}),
        ("loss.vocabulary_parallel", {"vocabulary_parallel": "auto"}),
        ("loss.kd_weight", {"kd_weight": 0.0, "ce_weight": 1.0}),
    ],
)
def test_what_cannot_be_is_refused_by_name(key, change):
    config = Config()
    config.on_policy = OnPolicyConfig()
    config.data.eval = "held-out"
    for name, value in change.items():
        sections = [config.on_policy, config.teacher, config.loss, config.data]
        section = next(one for one in sections if hasattr(one, name))
        setattr(section, name, value)
    found = [problem for problem in check(config) if problem.startswith(f"{key}:")]
    assert len(found) == 1 and len(check(config)) == 1
    config.on_policy = None
    assert not [problem for problem in check(config) if "on_policy" in problem]


def test_an_idle_section_asks_nothing_of_the_others():
    config = Config()
    config.on_policy = OnPolicyConfig(fraction=0.0)
    config.data.packing = "on"
    assert check(config) == []
