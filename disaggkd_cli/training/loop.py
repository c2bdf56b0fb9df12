"""The training loop of one student rank: steps, evaluations, checkpoints, and stopping in good order."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from disaggkd_cli.config import Config
from disaggkd_cli.errors import RunError, SavedAndResumable
from disaggkd_cli.faults import fault_point
from disaggkd_cli.models import head_of
from disaggkd_cli.on_policy.completions import Completion
from disaggkd_cli.on_policy.writer import StudentWriter
from disaggkd_cli.training.checkpoint import Checkpointer
from disaggkd_cli.training.evaluation import doubts_about_teacher, evaluate
from disaggkd_cli.training.fixed_prompts import FixedPrompts
from disaggkd_cli.training.layout import waiting_for
from disaggkd_cli.training.metrics import MetricsLog
from disaggkd_cli.training.optimizer import clip_gradients, set_learning_rate
from disaggkd_cli.training.own_continuations import OWN_KD, evaluate_own_continuations
from disaggkd_cli.training.process import StopSignals, peak_memory_bytes
from disaggkd_cli.training.progress import RunProgress
from disaggkd_cli.training.schedule import WorkPlan, learning_rate
from disaggkd_cli.training.sources import HiddenStateSource, TeacherRows
from disaggkd_cli.training.stage_record import stage_idle_shares
from disaggkd_cli.training.student_module import StudentModule
from disaggkd_cli.training.timeline import EVALUATE, TRAIN, UPDATE, WAIT, Timeline, moment
from disaggkd_cli.transport import TeachersLost
from disaggkd_cli.transport.meter import name_bottleneck

_STEPS_BETWEEN_ADVICE = 25
"""How many steps of stall and idle figures the advice about the bottleneck looks back on."""

_PARTS = ("loss", "kd", "ce", "top1_agreement", "dropped_teacher_mass")


@dataclass
class Training:
    """Everything that one student rank trains with.

    Attributes:
        identity: what the run is made of; recorded in each checkpoint and compared on resume.
        metrics: None on ranks other than 0.
        evaluated: called with the step and the figures of each evaluation.
        samples: what both models write to fixed prompts at each evaluation; None: nothing.
        writer: who writes the texts of an on-policy run; None in others.
        done: optimizer steps done so far.
        timeline: when this rank waited, trained and evaluated.
        stalled_seconds, trained_seconds: of the steps since the last advice about the bottleneck.
        advice: what that was.
    """

    config: Config
    module: StudentModule
    optimizer: torch.optim.Optimizer
    plan: WorkPlan
    source: HiddenStateSource
    checkpointer: Checkpointer
    identity: dict[str, Any]
    device: torch.device
    signals: StopSignals
    progress: RunProgress
    metrics: MetricsLog | None
    evaluated: Callable[[int, dict[str, float]], None]
    samples: FixedPrompts | None = None
    writer: StudentWriter | None = None
    done: int = 0
    stalled_seconds: float = 0.0
    trained_seconds: float = 0.0
    advice: str = ""
    timeline: Timeline = field(default_factory=Timeline)


def train(run: Training) -> None:
    """Train from `run.done` to the configured number of steps.

    Raises:
        SavedAndResumable: stopped early by a signal, by `train.stop_at`, or for want of teachers; the state is saved.
        RunError: a checkpoint could not be written (`train.on_save_error=stop`), the loss is not finite, or another
            student rank is gone or stuck.
    """
    train_config = run.config.train
    try:
        if run.done == 0:
            _evaluate(run)
        while run.done < train_config.steps:
            with waiting_for(f"step {run.done + 1} of the others"):
                stop = _step(run)
            if run.plan.evaluates_after(run.done):
                _evaluate(run)
            finished = run.done == train_config.steps
            due = train_config.save_every > 0 and run.done % train_config.save_every == 0
            if stop and not finished:
                _save(run, wait=True)
                raise SavedAndResumable(f"{stop}; saved after step {run.done}: go on with --resume auto")
            if due or finished:
                _save(run, wait=finished)
    except TeachersLost as lost:
        _save(run, wait=True)
        raise SavedAndResumable(
            f"{lost}; saved after step {run.done}: start a teacher, then go on with --resume auto"
        ) from lost


def _step(run: Training) -> str | None:
    """Do one optimizer step; return why to stop now, or None."""
    config, step = run.config, run.done
    started = time.monotonic()
    if run.writer is not None:
        run.writer.write_due(run.module.model, step)
        fault_point("after_writing")
    # Dropout, where a model has it, is drawn anew from the step, so that a resumed run draws the same.
    torch.manual_seed(_mixed_seed(config.seed, step, run.plan.rank))
    names = _figures(run)
    parts = torch.zeros(len(names), dtype=torch.float64, device=run.device)
    stall, tokens, rows_of_step = 0.0, 0, 0
    for _ in range(config.train.accumulation):
        rows = _take_together(run)
        if rows.item.evaluation or rows.item.step != step:
            raise RunError(f"the stream has step {rows.item.step} where training step {step} was due")
        begun = moment()
        loss, out = run.module(rows.item.batch.to(run.device), rows.hidden, rows.item.supervised_rows)
        loss.backward()
        run.timeline.add(TRAIN, begun, rows.item.request_id)
        rows.release()
        parts += torch.stack([getattr(out, name).detach() for name in names]).double()
        stall += rows.stall_seconds
        tokens += rows.item.tokens
        rows_of_step = rows.item.supervised_rows
    rate = learning_rate(config.train, step)
    set_learning_rate(run.optimizer, rate)
    begun = moment()
    norm = clip_gradients(run.module, config.train.clip_norm)
    fault_point("before_commit")
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    run.timeline.add(UPDATE, begun)
    run.done += 1
    fault_point("after_commit")
    # The one place in a step where a GPU is waited for.
    figures = torch.cat([parts, norm.double().reshape(1)]).cpu()
    parts, norm = figures[:-1], float(figures[-1])
    seconds = time.monotonic() - started
    return _record(run, parts, norm, rate, stall, tokens, rows_of_step, seconds)


def _figures(run: Training) -> tuple[str, ...]:
    """Return the names of the loss's figures that a step's line has."""
    router = () if run.module.router is None else ("router_aux",)
    hidden = () if run.module.projection is None else ("hidden",)
    return (*_PARTS, *router, *hidden, *(() if run.writer is None else ("written_kd",)))


def _record(
    run: Training,
    parts: torch.Tensor,
    norm: float,
    rate: float,
    stall: float,
    tokens: int,
    supervised_rows: int,
    seconds: float,
) -> str | None:
    """Add figures up over the ranks, write and show them, and agree whether to stop."""
    figures = run.source.figures()
    wish = run.signals.received is not None
    sums = torch.cat([parts, torch.tensor([tokens, figures.received_bytes, figures.ring_fill], dtype=torch.float64)])
    peaks = torch.tensor([stall, seconds, peak_memory_bytes(run.device), float(wish)], dtype=torch.float64)
    dist.all_reduce(sums)
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    values = dict(zip(_figures(run), sums.tolist(), strict=False))
    all_tokens, received, fill = sums[len(parts) :].tolist()
    stall, seconds, memory, wish_anywhere = peaks.tolist()
    line: dict[str, Any] = {
        **values,
        "learning_rate": rate,
        "grad_norm": norm,
        "supervised_tokens": supervised_rows,
        "tokens_per_second": all_tokens / seconds,
        "step_seconds": seconds,
        "stall_seconds": stall,
        "ring_fill": fill / run.config.student.ranks,
        "received_bytes": int(received),
        "peak_memory_bytes": int(memory),
    }
    if run.writer is not None:
        line |= run.writer.figures(run.done - 1, values["kd"], line.pop("written_kd"), supervised_rows)
    if figures.teachers:
        line["teachers"] = figures.teachers
        if run.metrics is not None and (idle := stage_idle_shares(run.config)):
            line["stage_idle_share"] = idle
    if run.metrics is not None:
        run.metrics.write(run.done, line)
    run.progress.step(run.done, line)
    _advise(run, stall, seconds, figures.teachers)
    if not torch.isfinite(sums[0]) or not norm < float("inf"):
        raise RunError(
            f"the loss of step {run.done} is {values['loss']} and its gradient norm {norm}; the newest checkpoint is "
            "from before it: lower train.learning_rate, or set train.clip_norm"
        )
    if wish_anywhere:
        return f"stopped by {run.signals.received or 'a signal to another rank'}"
    return "train.stop_at is reached" if run.done == run.config.train.stop_at else None


def _advise(run: Training, stall: float, seconds: float, teachers: dict[str, Any]) -> None:
    """Log which side is the bottleneck, and what to change, when that becomes clear or changes."""
    run.stalled_seconds += stall
    run.trained_seconds += seconds
    if not teachers or run.done % _STEPS_BETWEEN_ADVICE:
        return
    linked = [teacher["idle_share"] for teacher in teachers.values() if teacher["linked"]]
    idle = sum(linked) / len(linked) if linked else 0.0
    advice = name_bottleneck(run.stalled_seconds / run.trained_seconds, idle, run.config.transport.ring_depth)
    if advice and advice.split(":")[0] != run.advice.split(":")[0]:
        run.progress.log(advice)
        run.advice = advice
    run.stalled_seconds = run.trained_seconds = 0.0


def _take_together(run: Training) -> TeacherRows:
    """Take the next item on every rank, or raise TeachersLost on every rank: none may start a forward alone."""
    lost: TeachersLost | None = None
    rows: TeacherRows | None = None
    begun = moment()
    try:
        rows = run.source.take()
        run.timeline.add(WAIT, begun, rows.item.request_id)
    except TeachersLost as error:
        lost = error
    if run.config.student.ranks > 1 and run.config.mode == "disaggregated":
        lacking = torch.tensor([int(lost is not None)])
        dist.all_reduce(lacking, op=dist.ReduceOp.MAX)
        if lacking.item() and lost is None:
            lost = TeachersLost("another student rank has no teacher left")
    if lost is not None:
        raise lost
    return rows


def _evaluate(run: Training) -> None:
    completions: list[Completion] = []
    begun = moment()
    with waiting_for(f"the others' evaluation after step {run.done}"):
        figures = evaluate(run.module, lambda: _take_together(run), run.plan, run.done, run.device)
        # What this evaluation received is its own; asking also starts the next step's count anew.
        received = torch.tensor([run.source.figures().received_bytes], dtype=torch.float64)
        dist.all_reduce(received)
        figures["eval_received_bytes"] = int(received.item())
        if run.writer is not None:
            own, completions = evaluate_own_continuations(
                run.module, run.source, run.writer, run.plan.evaluation, run.config.data.sequence_length
            )
            figures |= own
    run.timeline.add(EVALUATE, begun)
    if run.metrics is not None:
        run.metrics.write(run.done, figures)
    run.progress.log(
        f"after step {run.done}: held-out perplexity {figures['eval_perplexity']:,.1f} (the teacher's "
        f"{figures['eval_teacher_perplexity']:,.1f}), KD loss {figures['eval_kd']:.4f}, agreement "
        f"{figures['eval_top1_agreement']:.1%}"
        + (f", KD loss on its own texts {figures[OWN_KD]:.4f}" if OWN_KD in figures else "")
    )
    if run.done == 0:
        for doubt in doubts_about_teacher(figures, head_of(run.module.model).weight.shape[0]):
            run.progress.log(doubt)
    run.evaluated(run.done, figures)
    if run.samples is not None:
        with waiting_for(f"the others' samples after step {run.done}"):
            run.samples.write(run.done, run.module, run.source, run.device, run.progress.log, completions)


def _save(run: Training, *, wait: bool) -> None:
    """Start a checkpoint of the current step; with `wait` it is on disk when this returns, or RunError is raised."""
    try:
        run.checkpointer.wait()
    except RunError as error:
        _tolerate(run, error)
    try:
        if run.checkpointer.started_step != run.done:
            texts = None if run.writer is None else run.writer.checkpoint(run.done)
            run.checkpointer.save(run.module, run.optimizer, run.done, run.identity, texts)
        if wait:
            run.checkpointer.wait()
    except RunError as error:
        if wait:
            raise
        _tolerate(run, error)


def _tolerate(run: Training, error: RunError) -> None:
    """Go on without a checkpoint that could not be written, when that is what the config wants."""
    if run.config.train.on_save_error == "stop":
        raise error
    run.progress.log(f"warning: {error}; going on, since train.on_save_error=warn")


def _mixed_seed(seed: int, step: int, rank: int) -> int:
    return (seed * 1_000_003 + step * 8191 + rank) % (1 << 63)
