"""What is written is a function of config, step and weights alone, and what is sampled follows the distribution."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from disaggkd_cli.data import IGNORE, Sequence, collate
from disaggkd_cli.errors import UserError
from disaggkd_cli.on_policy.completions import Completion, as_text, from_text
from disaggkd_cli.on_policy.generate import generate
from disaggkd_cli.on_policy.prompts import Room, prompt_length, with_room
from disaggkd_cli.on_policy.proportion import Proportion
from disaggkd_cli.on_policy.sampling import Sampler, draw, entropy
from disaggkd_cli.on_policy.uniforms import uniforms
from disaggkd_cli.on_policy.windows import Windows
from tests.support.models import VOCABULARY, tiny_model

CPU = torch.device("cpu")
DRAWS = 20_000


def test_numbers_are_a_function_of_their_place():
    first = uniforms(7, "train", 3, 1, 9)
    assert np.array_equal(uniforms(7, "train", 3, 1, 40)[:9], first)
    others = [
        uniforms(*place, 9) for place in [(8, "train", 3, 1), (7, "eval", 3, 1), (7, "train", 4, 1), (7, "train", 3, 0)]
    ]
    for other in others:
        assert not np.intersect1d(first, other).size


def test_numbers_are_uniform():
    found = np.concatenate([uniforms(1, "train", place, 0, 20) for place in range(1000)])
    assert found.min() >= 0 and found.max() < 1
    counts = np.histogram(found, 20, (0, 1))[0]
    expected = DRAWS / 20
    assert ((counts - expected) ** 2 / expected).sum() < 43.8  # chi-squared with 19 degrees of freedom, p = 0.001


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(1, 1, 0), (0.7, 1, 0), (1, 0.8, 0), (1.5, 0.9, 7)])
def test_frequencies_are_those_of_the_softmax(temperature, top_p, top_k):
    torch.manual_seed(0)
    logits = torch.randn(1, 23) * 2
    sampler = Sampler(temperature, top_p, top_k, 19)
    probabilities = sampler.probabilities(logits)
    numbers = np.concatenate([uniforms(5, "train", place, 0, 20) for place in range(DRAWS // 20)])
    tokens = draw(probabilities.expand(DRAWS, -1), torch.from_numpy(numbers))
    counts = torch.bincount(tokens, minlength=23).double()
    # The plain definition: temperature, the k likeliest, the smallest set whose mass reaches top_p, renormalised.
    plain = torch.softmax(logits[0, :19].double() / temperature, -1)
    order = plain.argsort(descending=True)
    kept = order[: top_k or 19]
    mass = plain[kept] / plain[kept].sum()
    kept = kept[: int((mass.cumsum(0) - mass < top_p).sum())]
    wanted = torch.zeros(23, dtype=torch.float64)
    wanted[kept] = plain[kept] / plain[kept].sum()
    torch.testing.assert_close(probabilities[0], wanted, atol=1e-6, rtol=1e-5)
    assert counts[wanted == 0].sum() == 0
    error = (counts / DRAWS - wanted).abs() / (wanted * (1 - wanted) / DRAWS).sqrt().clamp_min(1e-9)
    assert error[wanted > 0].max() < 4.5


def test_the_ends_of_the_interval_find_ids_that_can_be_drawn():
    probabilities = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]], dtype=torch.float64)
    numbers = torch.tensor([0.0, 0.4999, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    assert draw(probabilities.expand(4, -1), numbers).tolist() == [1, 1, 3, 3]
    assert entropy(probabilities).item() == pytest.approx(np.log(2))


@pytest.mark.parametrize("fraction", ["0.25", "0.5", "1.0", "0.1", "0.3"])
def test_the_share_is_exact(fraction):
    proportion = Proportion.of(float(fraction))
    found = [place.position for place in proportion.written(0, 1000)]
    assert len(found) == 1000 * Fraction(fraction)
    for start in range(0, 1000, 8):
        here = [place.position for place in proportion.written(start, start + 8)]
        assert here == [position for position in found if start <= position < start + 8]
        assert abs(len(here) - 8 * float(fraction)) < 1


def test_no_share_is_nothing_and_samples_share_a_prompt():
    assert Proportion.of(0.0).written(0, 99) == []
    places = Proportion.of(0.5, samples=2).written(0, 8)
    assert [(place.position, place.prompt, place.sample) for place in places] == [
        (1, 1, 0), (3, 1, 1), (5, 5, 0), (7, 5, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_each_window_is_written_once_with_weights_of_a_fixed_age(every, lag):
    windows = Windows(every, lag, 10)
    written = {window: done for done in range(10) for window in windows.due(done)}
    assert sorted(written) == list(range(-(-10 // every)))
    assert [window for done in range(10) for window in windows.due(done)] == sorted(written)
    assert all(done == max(0, (window - lag) * every) for window, done in written.items())
    for done in range(1, 10):
        waiting = [window for window, when in written.items() if when < done and windows.steps_of(window)[-1] >= done]
        assert windows.open(done) == waiting


def labelled(supervised):
    labels = np.where(supervised, 5, IGNORE).astype(np.int32)
    return Sequence(np.arange(len(labels), dtype=np.int32), labels, (len(labels),))


def test_prompts_of_texts_pairs_and_conversations():
    assert prompt_length(labelled([1, 1, 1, 1, 1, 0]).labels, 4) == 4
    assert prompt_length(labelled([1, 1, 0]).labels, 32) == 2  # never the end of a text
    assert prompt_length(labelled([0, 0, 1, 1, 0]).labels, 32) == 3
    assert prompt_length(labelled([0, 1, 1, 0, 0, 0, 1, 0]).labels, 32) == 7


class Dataset:
    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def sequence(self, index):
        return labelled([0] * (self.lengths[index] - 1) + [1, 0])


def test_prompts_without_room_are_left_out_or_refused():
    room = Room(sequence_length=20, max_new_tokens=8, prompt_tokens=4)
    kept, line = with_room(Dataset([12] * 39 + [13]), room)
    assert kept.tolist() == list(range(39)) and "1 of 40" in line
    assert with_room(Dataset([3] * 4), room)[1] == ""
    with pytest.raises(UserError, match="on_policy.max_new_tokens: 3 of 40"):
        with_room(Dataset([12] * 37 + [13] * 3), room)


def completion(ids, stopped):
    return Completion(4, (8, 9), tuple(ids), stopped, 1.5)


def test_a_stopped_completion_supervises_its_end_and_a_cut_one_none():
    end = pad = 2
    stopped, cut, empty = completion([5, 6, end], True), completion([5, 6, 7], False), completion([end], True)
    batch = collate([one.sequence() for one in (stopped, cut, empty)], pad)
    assert batch.labels.tolist() == [
        [IGNORE, 5, 6, end, IGNORE],
        [IGNORE, 5, 6, 7, IGNORE],
        [IGNORE] * 5,
    ]
    assert [one.supervised_rows for one in (stopped, cut, empty)] == [3, 3, 0]
    assert batch.written == (True, True, True)


def test_completions_survive_a_checkpoint_and_damage_is_named():
    kept = [completion([5, 6], False), completion([2], True)]
    assert from_text(as_text(kept), "file") == kept
    with pytest.raises(UserError, match="file: is damaged"):
        from_text('{"format": 1, "completions": [[1]]}', "file")


PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15], [40, 41]]


def written(model, numbers, prompts=PROMPTS, ends=frozenset({2, 3, 4})):
    return generate(model, prompts, numbers, Sampler(1.0, 1.0, 0, VOCABULARY), ends, 2, CPU)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "qwen3_moe", "falcon_h1", "qwen3_next"])
def test_a_batch_of_four_writes_what_four_of_one_write(family):
    model = tiny_model(family)
    numbers = np.stack([uniforms(3, "train", place, 0, 24) for place in range(4)])
    together = written(model, numbers)
    alone = [written(model, numbers[row : row + 1], [prompt])[0] for row, prompt in enumerate(PROMPTS)]
    assert [one.ids for one in together] == [one.ids for one in alone]
    assert [one.stopped for one in together] == [one.ids[-1] in (2, 3, 4) for one in together]
    assert [one.entropy for one in together] == pytest.approx([one.entropy for one in alone], rel=1e-4)


def test_the_cache_changes_nothing():
    model = tiny_model("llama")
    numbers = uniforms(3, "train", 0, 0, 12)[None]
    (found,) = written(model, numbers, [[5, 6, 7]], frozenset())
    ids = [5, 6, 7]
    with torch.no_grad():
        for number in numbers[0]:
            probabilities = torch.softmax(model(torch.tensor([ids])).logits[:, -1].double(), -1)
            ids.append(int(draw(probabilities, torch.tensor([number]))[0]))
    assert found.ids == tuple(ids[3:]) and not found.stopped
