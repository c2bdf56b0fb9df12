"""A whole optimizer step of an on-policy run against float64 in plain torch: what is drawn, the loss, every gradient.

The oracle shares nothing with the run but the models, the prompts' places and the uniform numbers: it draws token by
token from whole forwards without a cache, and adds the divergence up over written-out softmaxes.
"""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from disaggkd_cli.checks.sample import dataset_of
from disaggkd_cli.config import Config
from disaggkd_cli.config.on_policy import OnPolicyConfig
from disaggkd_cli.data import IGNORE, Sequence
from disaggkd_cli.losses import Head
from disaggkd_cli.models import backbone_of, head_of, hidden_states
from disaggkd_cli.on_policy.gathered import GatheredStudent
from disaggkd_cli.on_policy.proportion import Proportion
from disaggkd_cli.on_policy.sampling import Sampler
from disaggkd_cli.on_policy.texts import OnPolicyTexts
from disaggkd_cli.on_policy.uniforms import uniforms
from disaggkd_cli.on_policy.writer import StudentWriter
from disaggkd_cli.training.schedule import WorkPlan
from disaggkd_cli.training.student_module import StudentModule
from tests.support.models import VOCABULARY, tiny_model

ENDS = tuple(range(2, 34))
TOKENS, PROMPT = 9, 5
CE, SEED = 0.37, 11


def config_of(divergence: str, fraction: float) -> Config:
    config = Config()
    config.seed, config.data.sequence_length = SEED, 32
    config.loss.divergence, config.loss.ce_weight, config.loss.temperature = divergence, CE, 1.7
    config.train.steps, config.train.micro_batch_sequences, config.train.accumulation = 2, 3, 3
    config.on_policy = OnPolicyConfig(
        fraction=fraction, max_new_tokens=TOKENS, temperature=0.8, top_k=61, samples=2, prompt_tokens=PROMPT, lag=0
    )
    return config


def texts() -> list[Sequence]:
    """Seven running texts and six pairs of odd lengths."""
    numbers = np.random.default_rng(5)
    found = []
    for at in range(13):
        ids = numbers.integers(8, VOCABULARY, 7 + at).astype(np.int32)
        labels = np.append(ids[1:], IGNORE).astype(np.int32)
        if at % 2:
            labels[: at // 2 + 1] = IGNORE
        found.append(Sequence(ids, labels, (len(ids),)))
    return found


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def drawn(model: nn.Module, prompt: list[int], numbers: np.ndarray) -> tuple[list[int], bool]:
    """What follows a prompt, by whole forwards; and whether it stopped."""
    ids = []
    for number in numbers:
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0, -1].double() / 0.8
        smallest = logits.sort(descending=True).values[60]
        weights = [0.0 if logit < smallest else np.exp(float(logit - logits.max())) for logit in logits]
        reached = np.cumsum(weights)
        token = int(np.flatnonzero(reached > number * reached[-1])[0])
        ids.append(token)
        if token in ENDS:
            return ids, True
    return ids, False


def divergence_of(name: str, teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """[T] of logits [T, V]."""
    p, q = torch.softmax(teacher / 1.7, -1), torch.softmax(student / 1.7, -1)
    if name == "jsd":
        middle = (p + q) / 2
        return 0.5 * ((p * (p / middle).log()).sum(-1) + (q * (q / middle).log()).sum(-1))
    return (q * (q / p).log()).sum(-1) if name == "reverse_kl" else (p * (p / q).log()).sum(-1)


@pytest.mark.parametrize(("divergence", "fraction"), [("reverse_kl", 0.5), ("forward_kl", 0.25), ("jsd", 1.0)])
def test_a_step_is_what_plain_torch_makes_of_it(alone, divergence, fraction):
    config = config_of(divergence, fraction)
    torch.manual_seed(3)
    student, teacher = tiny_model("llama").double(), tiny_model("llama").double()
    with torch.no_grad():
        for one in (*teacher.parameters(), *student.parameters()):
            one.add_(torch.randn_like(one) * 0.05)
    oracle = copy.deepcopy(student)
    size, sequences = config.global_batch_sequences, texts()
    dataset = dataset_of(sequences)

    head = head_of(teacher)
    module = StudentModule(student, Head(head.weight.detach()), config.loss)
    held = OnPolicyTexts(dataset, config.on_policy, SEED, size, config.train.steps)
    writer = StudentWriter(
        held, GatheredStudent(student, torch.float64), Sampler(0.8, 1.0, 61, VOCABULARY), frozenset(ENDS), 0, SEED, 3,
        torch.device("cpu"),
    )  # fmt: skip
    writer.write_due(student, 0)
    plan = WorkPlan(config, held, dataset, 0, 0)
    items = list(plan._training(0, 0, next(held.batches(SEED, size, 0))))
    loss = 0.0
    for item in items:
        with torch.no_grad():
            states = hidden_states(backbone_of(teacher), item.batch.input_ids, item.batch.position_ids)
        one, _ = module(item.batch, states.reshape(-1, states.shape[-1])[item.batch.rows], item.supervised_rows)
        one.backward()
        loss += one.item()

    indices = [int(held._prompt_order.indices(at, 1)[0]) for at in range(size)]
    places = {place.position: place for place in Proportion.of(fraction, 2).written(0, size)}
    sums, rows, lengths = 0.0, 0, []
    for at, index in enumerate(indices):
        given = sequences[index]
        if at in places:
            prompted = sequences[indices[places[at].prompt]]
            asks = int(np.flatnonzero(prompted.labels != IGNORE)[0]) + 1
            prompt = prompted.input_ids[: asks if asks > 1 else PROMPT].tolist()
            with torch.no_grad():
                ids, stopped = drawn(
                    oracle, prompt, uniforms(SEED, "train", places[at].prompt, places[at].sample, TOKENS)
                )
            assert list(held.of_step(0)[len(lengths)].ids) == ids
            lengths.append(len(ids))
            targets = [] if stopped and len(ids) == 1 else list(range(len(prompt), len(prompt) + len(ids)))
            whole, labelled = [*prompt, *ids], False
        else:
            whole, labelled = given.input_ids.tolist(), True
            targets = [row + 1 for row in np.flatnonzero(given.labels != IGNORE)]
        logits = oracle(torch.tensor([whole])).logits[0]
        with torch.no_grad():
            judged = teacher(torch.tensor([whole])).logits[0]
        before = [target - 1 for target in targets]
        rows += len(targets)
        sums = sums + 1.7**2 * divergence_of(divergence, judged[before], logits[before]).sum()
        if labelled:
            likely = torch.log_softmax(logits[before], -1)
            sums = sums - CE * sum(likely[row, whole[target]] for row, target in enumerate(targets))
    wanted = sums / rows
    wanted.backward()
    assert items[0].supervised_rows == rows and set(lengths) != {TOKENS}
    assert loss == pytest.approx(wanted.item(), rel=1e-12)
    for found, expected in zip(student.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-9, atol=1e-13)
