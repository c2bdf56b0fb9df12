"""What is computed when is a pure function of the config and the step."""

import numpy as np
import pytest

from disaggkd_cli.config import Config, TrainConfig
from disaggkd_cli.data import Sequence, TokenizedDataset
from disaggkd_cli.training.schedule import WorkPlan, learning_rate


class Texts:
    """Sequences of different lengths whose first token is their number."""

    source_sizes = ()
    weights = ()
    batches = TokenizedDataset.batches

    def __init__(self, count: int, length_bucketing: bool = False) -> None:
        self.length_bucketing = length_bucketing
        self._sequences = []
        for number in range(count):
            length = 3 + number * 7 % 19 if length_bucketing else 3 + number % 4
            labels = np.full(length, 7, dtype=np.int32)
            labels[-1] = -100
            self._sequences.append(Sequence(np.full(length, number, dtype=np.int32), labels, (length,)))
        self.supervised_counts = np.array([len(sequence) - 1 for sequence in self._sequences], dtype=np.int32)
        self.lengths = np.array([len(sequence) for sequence in self._sequences])

    def __len__(self) -> int:
        return len(self._sequences)

    def sequence(self, number: int) -> Sequence:
        return self._sequences[number]


def plan(
    rank=0, ranks=1, micro=4, accumulation=1, steps=6, eval_every=2, train=23, held_out=5, bucketed=False
) -> WorkPlan:
    config = Config()
    config.student.ranks = ranks
    config.train = TrainConfig(
        steps=steps, micro_batch_sequences=micro, accumulation=accumulation, eval_every=eval_every
    )
    return WorkPlan(config, Texts(train, bucketed), Texts(held_out, bucketed), rank, 0)


def seen(plans: list[WorkPlan], evaluation: bool) -> dict[int, list[int]]:
    """Return by step the sorted numbers of the sequences that all ranks together compute."""
    found: dict[int, list[int]] = {}
    for each in plans:
        for item in each.items(0):
            if item.evaluation == evaluation:
                rows = (item.batch.labels != -100).any(dim=1)
                found.setdefault(item.step, []).extend(item.batch.input_ids[rows, 0].tolist())
    return {step: sorted(numbers) for step, numbers in found.items()}


@pytest.mark.parametrize("bucketed", [False, True])
@pytest.mark.parametrize(("ranks", "micro", "accumulation"), [(1, 2, 4), (2, 2, 2), (2, 4, 1), (4, 1, 2)])
def test_a_global_batch_is_the_same_however_it_is_cut(ranks, micro, accumulation, bucketed):
    whole = seen([plan(micro=8, bucketed=bucketed)], False)
    cut = seen([plan(rank, ranks, micro, accumulation, bucketed=bucketed) for rank in range(ranks)], False)
    assert cut == whole


@pytest.mark.parametrize("bucketed", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_evaluation_reads_every_held_out_sequence_once(ranks, bucketed):
    found = seen([plan(rank, ranks, micro=1, bucketed=bucketed) for rank in range(ranks)], True)
    assert found == {step: [0, 1, 2, 3, 4] for step in (0, 2, 4, 6)}


def test_all_ranks_take_the_same_number_of_items():
    counts = {len(list(plan(rank, 3, micro=2).items(0))) for rank in range(3)}
    assert len(counts) == 1


@pytest.mark.parametrize("bucketed", [False, True])
def test_no_sequence_is_dropped_at_the_end_of_an_epoch(bucketed):
    train = plan(micro=4, steps=23, eval_every=0, bucketed=bucketed)
    numbers = [number for step in seen([train], False).values() for number in step]
    assert sorted(numbers) == sorted(list(range(23)) * 4)


def test_a_sequence_comes_just_once_in_every_epoch_though_batches_are_made_by_length():
    items = [item for item in plan(micro=1, steps=69, eval_every=0, bucketed=True).items(0) if not item.evaluation]
    numbers = [int(item.batch.input_ids[0, 0]) for item in items]
    for epoch in range(3):
        assert sorted(numbers[epoch * 23 : (epoch + 1) * 23]) == list(range(23))


def test_ranks_get_batches_of_similar_lengths_padded_to_a_multiple_of_eight():
    plans = [plan(rank, 2, 2, train=400, steps=90, eval_every=0, bucketed=True) for rank in range(2)]
    for each in plans:
        each.config.data.sequence_length = 21
    streams = [[item.batch for item in each.items(0) if not item.evaluation] for each in plans]
    widths = [tuple(batch.input_ids.shape[1] for batch in batches) for batches in zip(*streams, strict=True)]
    assert {width for pair in widths for width in pair} == {8, 16, 21}
    # Lengths of one global batch are neighbours among 256: only a few batches straddle a multiple of eight.
    assert sum(a != b for a, b in widths) <= 6
    plain = plan(train=400, steps=90, eval_every=0)
    plain.train.lengths, plain.train._sequences = plans[0].train.lengths, plans[0].train._sequences
    unsorted = [item.batch for item in plain.items(0) if not item.evaluation]
    padded = sum(batch.input_ids.numel() for batches in streams for batch in batches)
    assert padded < 0.85 * sum(batch.input_ids.numel() for batch in unsorted)


@pytest.mark.parametrize("bucketed", [False, True])
@pytest.mark.parametrize("first", [1, 2, 3, 4, 5, 6])
def test_a_resumed_stream_is_the_rest_of_the_stream(first, bucketed):
    made = plan(accumulation=2, bucketed=bucketed)
    whole = list(made.items(0))
    assert [item.request_id for item in whole] == list(range(len(whole)))
    resumed = list(made.items(first))
    done = [item for item in whole if item.step < first or (item.evaluation and item.step == first)]
    rest = whole[len(done) :]
    assert [(item.request_id, item.step, item.evaluation) for item in resumed] == [
        (item.request_id, item.step, item.evaluation) for item in rest
    ]
    assert all(a.batch.input_ids.equal(b.batch.input_ids) for a, b in zip(resumed, rest, strict=True))


def test_the_normaliser_counts_the_whole_step():
    plans = [plan(rank, 2, 2, 2) for rank in range(2)]
    items = [item for each in plans for item in each.items(0) if not item.evaluation and item.step == 3]
    assert {item.supervised_rows for item in items} == {sum(item.batch.supervised_count for item in items)}


def test_tokens_do_not_count_padding():
    item = next(item for item in plan().items(0) if not item.evaluation)
    lengths = [3 + number % 4 for number in item.batch.input_ids[:, 0].tolist()]
    assert item.tokens == sum(lengths) < item.batch.input_ids.numel()


def test_learning_rates():
    def rates(schedule):
        train = TrainConfig(steps=10, warmup_steps=2, learning_rate=1.0, schedule=schedule)
        return [learning_rate(train, step) for step in range(10)]

    assert rates("constant") == [0.5] + [1.0] * 9
    assert rates("linear") == pytest.approx([0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125])
    cosine = rates("cosine")
    assert cosine[:3] == [0.5, 1.0, 1.0]
    assert cosine[6] == pytest.approx(0.5)
    assert all(a >= b for a, b in zip(cosine[2:], cosine[3:], strict=False))


def test_a_run_shorter_than_its_warm_up():
    train = TrainConfig(steps=3, warmup_steps=10, learning_rate=1.0)
    assert [learning_rate(train, step) for step in range(3)] == pytest.approx([0.1, 0.2, 0.3])
