"""A step's figures are of all its micro-batches, and its update is made once."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from disaggkd_cli.config import Config
from disaggkd_cli.errors import RunError
from disaggkd_cli.training import loop

STALLS = (0.5, 0.25, 0.125)


class Student(nn.Module):
    """Its loss of a micro-batch is the weight times the micro-batch's number."""

    router = projection = None

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0]))

    def forward(self, batch, hidden, supervised_rows):
        loss = self.weight.sum() * hidden
        parts = {name: loss.detach() * factor for factor, name in enumerate(loop._PARTS, 1)}
        return loss, SimpleNamespace(**parts)


class Source:
    def __init__(self, step=0, evaluation=False):
        self.numbers = iter(range(1, 4))
        self.released = []
        self.place = {"step": step, "evaluation": evaluation}

    def take(self):
        number = next(self.numbers)
        batch = SimpleNamespace(to=lambda device: None)
        item = SimpleNamespace(**self.place, batch=batch, supervised_rows=70, tokens=10 * number, request_id=number)
        return SimpleNamespace(
            item=item, hidden=float(number), stall_seconds=STALLS[number - 1],
            release=lambda: self.released.append(number),
        )  # fmt: skip

    def figures(self):
        return SimpleNamespace(received_bytes=640, ring_fill=0.5, teachers={})


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run_of(source, lines):
    config = Config()
    config.train.accumulation, config.train.clip_norm, config.train.schedule = 3, 0.0, "constant"
    config.train.learning_rate, config.train.warmup_steps = 0.25, 0
    student = Student()
    optimizer = torch.optim.SGD(student.parameters(), lr=9.0)
    return SimpleNamespace(
        config=config, module=student, optimizer=optimizer, source=source, plan=SimpleNamespace(rank=0), done=0,
        device=torch.device("cpu"), signals=SimpleNamespace(received=None), writer=None, timeline=loop.Timeline(),
        stalled_seconds=0.0, trained_seconds=0.0,
        progress=SimpleNamespace(step=lambda *_: None, log=lambda *_: None), advice="",
        metrics=SimpleNamespace(write=lambda step, line: lines.append((step, line))),
    )  # fmt: skip


def test_a_step_adds_its_micro_batches_up(alone):
    lines, source = [], Source()
    run = run_of(source, lines)
    assert loop._step(run) is None
    ((step, line),) = lines
    assert (step, run.done) == (1, 1)
    assert line["stall_seconds"] == sum(STALLS)
    assert [line[name] for name in loop._PARTS] == [6.0, 12.0, 18.0, 24.0, 30.0]
    assert line["grad_norm"] == 6.0
    assert line["supervised_tokens"] == 70 and line["received_bytes"] == 640 and line["ring_fill"] == 0.5
    assert line["tokens_per_second"] * line["step_seconds"] == pytest.approx(60)
    assert source.released == [1, 2, 3]
    assert run.module.weight.item() == 1.0 - 0.25 * 6.0, "one update with all gradients, at the schedule's rate"
    assert run.module.weight.grad is None
    json.dumps(line)


@pytest.mark.parametrize("place", [{"step": 1}, {"evaluation": True}])
def test_a_micro_batch_of_another_step_or_of_an_evaluation_is_refused(alone, place):
    with pytest.raises(RunError, match="where training step 0 was due"):
        loop._step(run_of(Source(**place), []))
