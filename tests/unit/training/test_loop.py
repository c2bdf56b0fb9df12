"""What the training loop does around its steps."""

from types import SimpleNamespace

import pytest
import torch

from disaggkd_cli.config import Config
from disaggkd_cli.errors import RunError
from disaggkd_cli.training import loop


class Shelf:
    """A checkpointer whose saves fail as told."""

    def __init__(self, fail_at: set[int]) -> None:
        self.fail_at = fail_at
        self.started_step = None
        self.pending = None
        self.written = []

    def save(self, module, optimizer, step, identity, texts) -> None:
        self.wait()
        self.started_step = self.pending = step

    def wait(self) -> None:
        step, self.pending = self.pending, None
        if step in self.fail_at:
            self.fail_at.discard(step)
            self.started_step = None
            raise RunError(f"checkpoint of step {step} could not be written")
        if step is not None:
            self.written.append(step)


def run_of(policy: str, shelf: Shelf):
    config = Config()
    config.train.on_save_error = policy
    said: list[str] = []
    progress = SimpleNamespace(log=said.append)
    return SimpleNamespace(
        config=config,
        checkpointer=shelf,
        progress=progress,
        module=None,
        optimizer=None,
        identity={},
        writer=None,
        done=0,
    ), said


def save_at(run, steps, last):
    for step in [*steps, last]:
        run.done = step
        loop._save(run, wait=step == last)


def test_a_failed_save_stops_the_run():
    run, _ = run_of("stop", Shelf({2}))
    with pytest.raises(RunError, match="step 2"):
        save_at(run, [1, 2, 3], 4)


def test_a_failed_save_is_tolerated_when_asked_for():
    shelf = Shelf({2})
    run, said = run_of("warn", shelf)
    save_at(run, [1, 2, 3], 4)
    assert shelf.written == [1, 3, 4]
    assert len(said) == 1
    assert "going on, since train.on_save_error=warn" in said[0]


def test_the_last_save_must_succeed():
    run, _ = run_of("warn", Shelf({4}))
    with pytest.raises(RunError, match="step 4"):
        save_at(run, [1], 4)


def test_the_save_before_the_last_may_fail():
    shelf = Shelf({3})
    run, said = run_of("warn", shelf)
    save_at(run, [3], 4)
    assert shelf.written == [4]
    assert len(said) == 1


def test_one_step_is_saved_once():
    shelf = Shelf(set())
    run, _ = run_of("stop", shelf)
    save_at(run, [4], 4)
    assert shelf.written == [4]


def test_seeds_differ_by_step_and_rank():
    seeds = {loop._mixed_seed(42, step, rank) for step in range(50) for rank in range(8)}
    assert len(seeds) == 400


def advised(shares, depth=3):
    said: list[str] = []
    config = Config()
    config.transport.ring_depth = depth
    run = loop.Training(
        config, None, None, None, None, None, {}, None, None, SimpleNamespace(log=said.append), None, None
    )
    for step, (stall, idle) in enumerate(shares, start=1):
        run.done = step * loop._STEPS_BETWEEN_ADVICE
        loop._advise(run, stall, 1.0, {"teacher 0": {"idle_share": idle, "linked": True}})
    return said


def test_the_bottleneck_is_named_once_and_again_when_it_moves():
    said = advised([(0.5, 0.05), (0.55, 0.05), (0.0, 0.9)])
    assert [line.split(":")[0] for line in said] == [
        "the teachers are the bottleneck",
        "the student is the bottleneck",
    ]


def test_nothing_is_said_when_nobody_waits():
    assert advised([(0.01, 0.1)]) == []


def test_a_step_stalls_for_all_of_its_micro_batches(monkeypatch):
    config = Config()
    config.train.accumulation = 3
    config.train.clip_norm = 0.0
    weight = torch.nn.Parameter(torch.ones(2))
    item = SimpleNamespace(
        evaluation=False,
        step=0,
        request_id=0,
        tokens=5,
        supervised_rows=4,
        batch=SimpleNamespace(to=lambda device: None),
    )
    stalls = iter([0.5, 0.0, 0.25])

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.router, self.projection = weight, None, None

        def forward(self, *_):
            return self.weight.sum(), SimpleNamespace(**{name: torch.zeros(()) for name in loop._PARTS})

    def take(_):
        return SimpleNamespace(item=item, hidden=None, release=lambda: None, stall_seconds=next(stalls))

    recorded = []
    monkeypatch.setattr(loop, "_take_together", take)
    monkeypatch.setattr(loop, "_record", lambda run, *figures: recorded.append(figures))
    run = SimpleNamespace(
        config=config, done=0, writer=None, plan=SimpleNamespace(rank=0), module=Module(), device="cpu",
        timeline=loop.Timeline(), optimizer=torch.optim.SGD([weight], lr=0.1),
    )  # fmt: skip
    loop._step(run)
    parts, norm, rate, stall, tokens, rows, seconds = recorded[0]
    assert stall == 0.75
    assert tokens == 15
