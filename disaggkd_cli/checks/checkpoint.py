"""Does a checkpoint bring back every bit, and does the exported student load with the same loss?"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from disaggkd_cli.checks.result import CheckResult, judge, not_applicable
from disaggkd_cli.checks.subject import Subject
from disaggkd_cli.models import load_causal_lm, resolve_source
from disaggkd_cli.training.build import Components, build_module
from disaggkd_cli.training.checkpoint import (
    Checkpointer,
    load_training_state,
    newest_checkpoint,
    read_checkpoint,
    step_directory,
    training_state,
)
from disaggkd_cli.training.export import export_student
from disaggkd_cli.training.optimizer import clip_gradients
from disaggkd_cli.training.student_module import StudentModule
from disaggkd_cli.units import format_bytes

MOST_BYTES = 4 * 2**30
"""Larger checkpoints are not written for a check."""


def check_checkpoint(subject: Subject) -> CheckResult:
    """Take a step, save, destroy the state, load it again and compare; then export, reload and compare the loss.

    The student is sharded over this one rank and changed by this check, so it comes last. Needs the default process
    group.
    """
    parameters = sum(parameter.numel() for parameter in subject.student.parameters())
    size = 16 * parameters
    place = _nearest_directory(Path(subject.config.run_dir).expanduser())
    free = shutil.disk_usage(place).free
    limit = min(MOST_BYTES, free)
    if size > limit:
        there = f"a check writes at most {format_bytes(limit)}" if limit < free else f"{place} has {format_bytes(free)}"
        return not_applicable(f"checkpoint and export take {format_bytes(size)}; {there}")
    with tempfile.TemporaryDirectory(prefix=".disaggkd_check_", dir=place) as directory:
        return _round_trip(subject, Path(directory))


def _round_trip(subject: Subject, directory: Path) -> CheckResult:
    components = Components(
        subject.student, subject.teacher_head, None, subject.tokenizer, subject.splits, {"check": 1}
    )
    module, optimizer = build_module(subject.config, components, subject.device, lambda line: None)
    module.eval()
    batch = subject.batch
    rows = subject.teacher_states(batch)
    loss, _ = module(batch, rows, batch.supervised_count)
    loss.backward()
    clip_gradients(module, subject.config.train.clip_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    group = dist.new_group(backend="gloo")
    checkpointer = Checkpointer(directory, 1, group)
    checkpointer.save(module, optimizer, 1, components.identity)
    checkpointer.wait()
    before = _hashes(training_state(module, optimizer))
    written = step_directory(directory, 1)
    size = sum(path.stat().st_size for path in written.iterdir())
    with torch.no_grad():
        for tensor in training_state(module, optimizer).values():
            _local(tensor).zero_()
    load_training_state(read_checkpoint(written), module, optimizer, group)
    after = _hashes(training_state(module, optimizer))
    differing = sorted(name for name in before if before[name] != after.get(name))
    _, out = module(batch, rows, batch.supervised_count, evaluation=True)
    export_student(module.model, subject.tokenizer, directory / "student", torch.float32)
    again = load_causal_lm(resolve_source(str(directory / "student")), subject.compute_dtype, "the exported student")
    reloaded = StudentModule(again, subject.teacher_head, subject.config.loss).to(subject.device)
    with torch.no_grad():
        _, exported = reloaded(batch, rows, batch.supervised_count, evaluation=True)
    off = abs(exported.ce.item() - out.ce.item()) / max(abs(out.ce.item()), 1e-12)
    tolerance = 1e-5 if subject.compute_dtype == torch.float32 else 1e-3
    found = newest_checkpoint(directory, lambda line: None)
    blame = "the state that comes back is not the one that was saved, so a resumed run would go another way"
    if differing:
        blame = f"{len(differing)} tensors came back changed, first {differing[0]}"
    elif off > tolerance:
        blame = "the exported student loads, but its loss is another one"
    return judge(
        not differing and off <= tolerance and found is not None,
        f"{len(before):,} tensors bitwise equal; exported student's loss off by {off:.1e}"
        if not differing
        else f"{len(differing)} of {len(before):,} tensors differ",
        f"one step, saved ({format_bytes(size)}), zeroed and loaded; exported and loaded with from_pretrained",
        blame,
        tensors=len(before),
        differing=len(differing),
        export_loss=off,
        bytes=size,
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _hashes(state: dict[str, Tensor]) -> dict[str, str]:
    found = {}
    for name, tensor in state.items():
        data = _local(tensor).detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        found[name] = hashlib.sha256(memoryview(data.numpy())).hexdigest()
    return found


def _nearest_directory(path: Path) -> Path:
    while not path.is_dir():
        path = path.parent
    return path
