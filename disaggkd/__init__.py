"""disaggkd as a library: a run, a plan, and the loss, without the command line.

    import disaggkd

    disaggkd.run("configs/quickstart.yaml", "train.steps=10")
    plan = disaggkd.plan("configs/quickstart.yaml")
    out = disaggkd.fused_kd_loss(student_hidden, disaggkd.Head(weight), teacher_hidden, disaggkd.Head(weight_t), labels)

Nothing heavy is imported before it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from disaggkd_cli import __version__

if TYPE_CHECKING:
    from disaggkd_cli.losses import Head, fused_kd_loss, reference_kd_loss

__all__ = ["Head", "__version__", "fused_kd_loss", "plan", "reference_kd_loss", "run"]

_FROM_LOSSES = ("Head", "fused_kd_loss", "reference_kd_loss")


def run(config: str, *overrides: str, resume: str = "never", restarts: int = 3) -> int:
    """Run the whole job that `config` describes, as `disaggkd run` does, and return its exit code.

    Args:
        config: path of a YAML file.
        overrides: `key=value` texts, such as `train.steps=20`.
        resume: `auto`, `never`, or the path of a checkpoint.
        restarts: how often the student, and each teacher, may be started again.

    Returns:
        0 finished; 75 stopped early but saved, so that `resume="auto"` goes on.

    Raises:
        disaggkd_cli.errors.DisaggkdError: with the message for a person and the exit code.
    """
    from disaggkd_cli.jobs import run_job

    return run_job("run", config, list(overrides), resume, restarts, print_config=False, dry_run=False)


def plan(config: str, *overrides: str) -> dict[str, Any]:
    """Return the plan of `config`: what `disaggkd plan CONFIG --json` prints. Imports no torch, needs no GPU.

    Raises:
        disaggkd_cli.errors.UserError: naming the key and the mend.
    """
    from disaggkd_cli.config import load
    from disaggkd_cli.planner.inputs import workload_of
    from disaggkd_cli.planner.plan import as_json, make_plan

    return as_json(make_plan(workload_of(load(config, list(overrides)))))


def __getattr__(name: str) -> Any:
    if name in _FROM_LOSSES:
        from disaggkd_cli import losses

        return getattr(losses, name)
    raise AttributeError(f"module 'disaggkd' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
