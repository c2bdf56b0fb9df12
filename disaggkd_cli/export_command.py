"""`disaggkd export`: any checkpoint of a run as a model directory, without ranks and without the teacher's forward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

from disaggkd_cli.config import Config, load
from disaggkd_cli.config.layers import best_count
from disaggkd_cli.data import load_tokenizer
from disaggkd_cli.errors import UserError
from disaggkd_cli.models import build_student
from disaggkd_cli.models.hollow import ReadWhole, hollow_student
from disaggkd_cli.models.load import DTYPES
from disaggkd_cli.training.checkpoint import (
    Checkpoint,
    newest_checkpoint,
    read_checkpoint,
    read_weights,
    step_directory,
)
from disaggkd_cli.training.export import write_student
from disaggkd_cli.training.layer_choice import recorded_layers
from disaggkd_cli.training.publish import card_of
from disaggkd_cli.training.run_directory import EXPORTS_OF_STEPS, RunDirectory
from disaggkd_cli.training.settings import SETTINGS
from disaggkd_cli.verbosity import say


def export_command(
    run_dir: str, step: int | None, dtype: str | None, output: str | None, log: Callable[[str], None] = say
) -> Path:
    """Write the checkpoint of `step` (by default the newest valid one) as a model directory and return where.

    Args:
        run_dir: of the run.
        step: which checkpoint.
        dtype: of the weights; by default the run's `export.dtype`.
        output: where to; by default `student` in the run's directory, or `student_step_N` for a named step.
        log: takes lines for a person.

    Raises:
        UserError: no run, no such checkpoint, a damaged one, an unknown dtype, or an output that is there already.
        RunError: it cannot be written.
    """
    directory = RunDirectory(Path(run_dir).expanduser())
    if not directory.config.is_file():
        raise UserError(f"{run_dir}: holds no config.yaml, so it is no run's directory")
    config = load(directory.config)
    wanted = dtype or config.export.dtype
    if wanted not in DTYPES:
        raise UserError(f"--dtype {wanted}: must be one of {', '.join(DTYPES)}")
    checkpoint = _checkpoint(directory, step, log)
    target = Path(output).expanduser() if output else directory.export if step is None else _named(directory, step)
    if output and target.exists():
        raise UserError(f"--output {output}: is there already; choose another directory")
    settle_as_trained(config, directory, checkpoint)
    model = _student(config)
    card = card_of(config, directory, checkpoint.step)
    tokenizer = load_tokenizer(config.student.model or config.teacher.model)

    def fetch(names: list[str], owner: int) -> dict[str, Tensor]:
        return read_weights(checkpoint, model, names)

    write_student(model, fetch, tokenizer, target, DTYPES[wanted], card)
    log(f"{target}: the student after step {checkpoint.step}, {wanted}")
    return target


def settle_as_trained(config: Config, directory: RunDirectory, checkpoint: Checkpoint) -> None:
    """Put into the config what the run made of `best_N` layers and of `student.dtype: auto`."""
    layers = recorded_layers(directory.root)
    of_teacher = config.student.from_teacher
    if of_teacher is not None and best_count(of_teacher.layers) is not None and layers is not None:
        of_teacher.layers = layers
    trained = checkpoint.identity.get(SETTINGS)
    if isinstance(trained, dict) and trained.get("student.dtype") in DTYPES:
        config.student.dtype = trained["student.dtype"]


def _student(config: Config) -> nn.Module:
    """Return the student, without weights where it can be described so."""
    with contextlib.suppress(ReadWhole):
        return hollow_student(config).model
    return build_student(config)


def _named(directory: RunDirectory, step: int) -> Path:
    return directory.root / EXPORTS_OF_STEPS.replace("*", str(step))


def _checkpoint(directory: RunDirectory, step: int | None, log: Callable[[str], None]) -> Checkpoint:
    if step is None:
        found = newest_checkpoint(directory.checkpoints, log)
        if found is None:
            raise UserError(f"{directory.root}: has no valid checkpoint to export")
        return found
    named = step_directory(directory.checkpoints, step)
    if not named.is_dir():
        there = [
            path.name.removeprefix("step_").lstrip("0") or "0" for path in sorted(directory.checkpoints.glob("step_*"))
        ]
        raise UserError(f"--step {step}: there is no such checkpoint; there are {', '.join(there) or 'none'}")
    return read_checkpoint(named)
