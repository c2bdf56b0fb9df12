"""Decide which checkpoint a run goes on from, and refuse one that belongs to another run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from disaggkd_cli.errors import UserError
from disaggkd_cli.training.checkpoint import (
    Checkpoint,
    newest_checkpoint,
    read_checkpoint,
    read_manifest,
    step_directory,
)
from disaggkd_cli.training.settings import SETTINGS, changes


def choose_checkpoint(
    root: Path, resume: str, identity: dict[str, Any], log: Callable[[str], None]
) -> Checkpoint | None:
    """Return the checkpoint to go on from, the same on every rank, or None to start afresh. Collective.

    Rank 0 looks and checks every byte; the others are told the step.

    Args:
        root: the run's checkpoints.
        resume: `never`, `auto` (the newest valid one, else afresh), or a checkpoint's directory.
        identity: what this run is made of.

    Raises:
        UserError: the named checkpoint is damaged, or the one found belongs to other data, tokenizer or teacher.
    """
    if resume == "never":
        return None
    found: Checkpoint | None = None
    problem: UserError | None = None
    if dist.get_rank() == 0:
        try:
            found = newest_checkpoint(root, log) if resume == "auto" else read_checkpoint(Path(resume).expanduser())
            if found is not None:
                _compare(found, identity)
        except UserError as error:
            problem = error
    agreed = torch.tensor([-2 if problem else -1 if found is None else found.step])
    dist.broadcast(agreed, src=0)
    step = int(agreed.item())
    if problem is not None:
        raise problem
    if step == -2:
        raise UserError("student 0 refused the checkpoint; its message says why")
    if step == -1 or found is not None:
        return found
    directory = step_directory(root, step) if resume == "auto" else Path(resume).expanduser()
    return Checkpoint(directory, step, identity, tuple(read_manifest(directory)["files"]))


def changed_settings(checkpoint: Checkpoint, identity: dict[str, Any]) -> list[str]:
    """Return what differs between the run that wrote a checkpoint and the one that goes on from it, and what that
    means for the weights; a line each."""
    before = checkpoint.identity.get(SETTINGS)
    return changes(before, identity.get(SETTINGS, {})) if isinstance(before, dict) else []


def _compare(checkpoint: Checkpoint, identity: dict[str, Any]) -> None:
    changed = [
        f"{name} (was {_short(checkpoint.identity.get(name))}, is {_short(value)})"
        for name, value in identity.items()
        if name != SETTINGS and checkpoint.identity.get(name) != value
    ]
    if changed:
        raise UserError(
            f"{checkpoint.directory}: cannot go on from it, since this changed: {'; '.join(changed)}. "
            "Put it back, or start in another run_dir"
        )


def _short(value: Any) -> str:
    text = str(value)
    return text[:12] if len(text) == 64 else text
