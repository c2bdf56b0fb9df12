"""`--verify`: trace the student's step on fake tensors with FSDP's memory tracker, and set it beside the closed form.

The traced step has the trainer's own sharding and its full-logits loss. What differs from a run on GPUs: the fused loss
is stood in for by what it allocates, delta nets take transformers' own code, and long runs are cut to a few layers and
tokens (the closed form is then evaluated for the same cut). Needs torch; takes tens of seconds on a CPU, and no memory
for weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from disaggkd_cli.config import Config
from disaggkd_cli.config.attention import GPU_ONLY, SDPA
from disaggkd_cli.errors import UserError
from disaggkd_cli.planner import memory
from disaggkd_cli.planner.models import hub_config
from disaggkd_cli.planner.terms import total
from disaggkd_cli.planner.workload import Cluster, Workload, is_hybrid, is_sparse

MAX_LAYERS, MAX_TOKENS = 6, 8192
BAND_DENSE, BAND_OTHER, BAND_BUILT = 0.02, 0.10, 0.25

_GROUPS = {
    "Sharded Param": "sharded weights",
    "OptState": "optimizer state",
    "Sharded Grad": "sharded gradients",
    "Unsharded Param": "whole weights and collectives",
    "All Gather": "whole weights and collectives",
    "Reduce Scatter": "whole weights and collectives",
    "Unsharded Grad": "whole weights and collectives",
    "Activation": "activations and loss",
    "Temp": "activations and loss",
    "Buffer": "activations and loss",
    "Inputs": "activations and loss",
}
_FIRST_WORDS = {
    "master weights": "sharded weights",
    "Adam moments": "optimizer state",
    "sharded gradients": "sharded gradients",
    "root unit, whole": "whole weights and collectives",
    "last all-gather": "whole weights and collectives",
    "layer weights, whole": "whole weights and collectives",
    "layer reduction": "whole weights and collectives",
    "embedding and head gradients": "activations and loss",
    "root reduction": "whole weights and collectives",
    "head gradient, whole": "activations and loss",
}
_NOT_TRACED = ("ring", "teacher head")


@dataclass(frozen=True)
class Verified:
    """Bytes by component group, predicted and traced, at the fullest moment of each."""

    work: Workload
    predicted: dict[str, float]
    traced: dict[str, float]
    phase: str
    band: float

    @property
    def error(self) -> float:
        """Relative error of the predicted peak."""
        return sum(self.predicted.values()) / sum(self.traced.values()) - 1


def verify_command(config: Config, work: Workload, as_json: bool, console: Console) -> int:
    """Print predicted against traced memory; 0 when within the band, else 1."""
    name = config.student.from_config or config.student.model
    if name is None:
        raise UserError(
            "--verify: works with student.model or student.from_config; from_teacher has no config.json of its own"
        )
    verified = verify(work, hub_config(name, "student.model"))
    if as_json:
        console.print(json.dumps(_plain(verified), indent=2), highlight=False, soft_wrap=True)
    else:
        console.print(_table(verified))
    return 0 if abs(verified.error) <= verified.band else 1


def cut(work: Workload, most: int = MAX_LAYERS) -> Workload:
    """The same student with few layers (every kind stays) and tokens, as it is traced."""
    shape = work.student
    layers = shape.layers
    if len(layers) > most:
        shape = replace(shape, layers=layers[:most], name=f"{shape.name}, first {most} layers")
    tokens = min(work.micro_batch_tokens, max(MAX_TOKENS // work.sequence, 1) * min(work.sequence, MAX_TOKENS))
    sequence = min(work.sequence, tokens)
    if is_hybrid(shape):
        sequence = min(sequence, 512)
        tokens = min(tokens, 2048)
    cluster: Cluster = replace(work.cluster, device="cpu")
    if work.student_attention in GPU_ONLY:  # which keep what fused kernels keep of rows that need no mask
        work = work.with_(student_attention=SDPA, packed=False)
    return work.with_(
        router_loss=False,  # the trace is of a step without it
        student=shape,
        micro_batch_tokens=tokens,
        sequence=sequence,
        delta_kernel="torch",
        cluster=cluster,
        supervised=1.0,
        vocabulary_parallel=False,
        replicate=1,
        accumulation=1,
        trained=1.0,
        head_trained=True,
    )


def verify(work: Workload, fields: dict[str, Any], layers: int = MAX_LAYERS) -> Verified:
    """Trace the student rank of `work`, cut down, and predict the same.

    Args:
        fields: the student's config.json.
        layers: the most to trace.
    """
    from disaggkd_cli.planner.trace import trace_student

    work = cut(work, layers)
    traced: dict[str, float] = {}
    for name, value in trace_student(work, fields).items():
        group = _GROUPS[name]
        traced[group] = traced.get(group, 0.0) + value
    rank = memory.student_rank(work, fused=work.implementation == "fused")
    phases = [
        replace(phase, terms=tuple(one for one in phase.terms if one.name not in _NOT_TRACED)) for phase in rank.phases
    ]
    phase = max(phases, key=lambda one: total(one.terms))
    predicted = dict.fromkeys(traced, 0.0)
    for one in phase.terms:
        group = _FIRST_WORDS.get(one.name, "activations and loss")
        predicted[group] = predicted.get(group, 0.0) + one.value
    other = is_sparse(work.student) or is_hybrid(work.student)
    band = BAND_BUILT if work.student.built else BAND_OTHER if other else BAND_DENSE
    return Verified(work, predicted, traced, phase.name, band)


def _plain(verified: Verified) -> dict[str, Any]:
    work = verified.work
    return {
        "student": work.student.name,
        "layers": len(work.student.layers),
        "micro_batch_tokens": work.micro_batch_tokens,
        "student_ranks": work.student_ranks,
        "fullest_phase": verified.phase,
        "predicted_bytes": {name: round(value) for name, value in verified.predicted.items()},
        "traced_bytes": {name: round(value) for name, value in verified.traced.items()},
        "error": verified.error,
        "band": verified.band,
    }


def _table(verified: Verified) -> Table:
    work = verified.work
    title = (
        f"{work.student.name} ({len(work.student.layers)} layers), {work.micro_batch_tokens:,} tokens of "
        f"{work.sequence:,} on one of "
        f"{work.student_ranks} ranks, traced on fake tensors; predicted for {verified.phase}"
    )
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("", "predicted GiB", "traced GiB", "error"):
        table.add_column(name, justify="left" if not name else "right")
    rows = [(name, verified.predicted.get(name, 0.0), value) for name, value in verified.traced.items()]
    rows.append(("peak", sum(verified.predicted.values()), sum(verified.traced.values())))
    for name, predicted, traced in rows:
        error = f"{predicted / traced - 1:+.1%}" if traced else "-"
        table.add_row(
            name, f"{predicted / 2**30:.3f}", f"{traced / 2**30:.3f}", error, style="bold" if name == "peak" else ""
        )
    return table
