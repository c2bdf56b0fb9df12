"""May this teacher be laid out so? Asked by `plan`, by `run --dry-run`, and by the ranks of a run before they load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from disaggkd_cli.errors import UserError
from disaggkd_cli.layouts.teacher import TeacherFacts
from disaggkd_cli.layouts.tensor_plans import shares_parameters, tensor_plan

ONE_RANK, PIPELINE, FSDP, TENSOR = "one rank", "pipeline", "fsdp", "tensor"
AUTO = "auto"
"""What `teacher.parallelism` may say besides, and `choose` decides."""
PARALLELISMS = (PIPELINE, FSDP, TENSOR)
EACH_RANK_SERVES = (FSDP,)
"""Where every rank of a replica answers requests of its own; elsewhere one answers for all."""

CARRY_MORE_THAN_HIDDEN_STATES: dict[str, str] = {
    "deepseek_v4": "several streams of hidden states go from layer to layer",
    "gemma3n": "several streams of hidden states go from layer to layer, and each layer reads an embedding of its own",
    "hy_v4": "several streams of hidden states go from layer to layer",
    "zamba": "each layer reads the embedded tokens besides the hidden states",
    "zamba2": "each layer reads the embedded tokens besides the hidden states",
}
"""model_type -> why its layers cannot be the stages of a pipeline: more than one tensor goes from layer to layer. For
plans, and a reason in words; what a run relies on is the proof on a small model (`models.stages.prove_stages`)."""

_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")
_QUERY_PROJECTIONS = ("q_proj", "q_b_proj", *_KEY_PROJECTIONS[1:])


@dataclass(frozen=True)
class Layout:
    """How the ranks of one replica share the teacher. With one rank the parallelism means nothing."""

    parallelism: str
    ranks: int = 1

    @property
    def kind(self) -> str:
        """`one rank`, `pipeline`, `fsdp` or `tensor`."""
        return ONE_RANK if self.ranks == 1 else self.parallelism


def why_not(layout: Layout, teacher: TeacherFacts) -> str | None:
    """Return why `teacher` cannot be laid out so, as `key: reason; mend`, or None where it can.

    Raises:
        ValueError: a parallelism that there is not.
    """
    if layout.parallelism not in PARALLELISMS:
        raise ValueError(f"{layout.parallelism!r} is none of {PARALLELISMS}")
    if layout.ranks == 1:
        return None
    return _RULES[layout.parallelism](layout.ranks, teacher)


def require(layout: Layout, teacher: TeacherFacts) -> None:
    """Raise UserError, with the reason and the mend, where `teacher` cannot be laid out so."""
    problem = why_not(layout, teacher)
    if problem:
        raise UserError(problem)


def choose(ranks: int, teacher: TeacherFacts) -> tuple[Layout, str]:
    """Return the layout that `teacher.parallelism: auto` takes for a replica of `ranks` ranks, and why.

    A pipeline where it is possible: every layer runs the kernels that one rank would run, and nothing is gathered or
    reduced. Else FSDP, which gives the same bits too.
    """
    if ranks == 1:
        return Layout(PIPELINE, 1), "one rank holds the whole teacher"
    refused = why_not(Layout(PIPELINE, ranks), teacher)
    if refused is None:
        return Layout(PIPELINE, ranks), "a pipeline gives one rank's bits and gathers nothing"
    return Layout(FSDP, ranks), f"no pipeline: {refused.partition(': ')[2].partition(';')[0]}"


def asked_layout(parallelism: str, ranks: int, teacher: TeacherFacts) -> tuple[Layout, str]:
    """Return the layout that `teacher.parallelism` and `teacher.ranks_per_replica` ask for, and why it is that one."""
    if parallelism == AUTO:
        return choose(ranks, teacher)
    return Layout(parallelism, ranks), f"teacher.parallelism={parallelism}"


def _why_no_pipeline(ranks: int, teacher: TeacherFacts) -> str | None:
    more = CARRY_MORE_THAN_HIDDEN_STATES.get(_family(teacher.model_type))
    if more:
        return f"teacher.parallelism: {teacher.name} cannot be cut into stages: {more}; use fsdp"
    if teacher.gguf:
        return "teacher.parallelism: pipeline reads its stages' layers from safetensors files, not from GGUF; use fsdp"
    if teacher.layers and ranks > teacher.layers:
        return (
            f"teacher.ranks_per_replica: {ranks} stages, but {teacher.name} has {teacher.layers} layers; "
            f"use at most {teacher.layers}"
        )
    return None


def _why_no_fsdp(ranks: int, teacher: TeacherFacts) -> str | None:
    if shares_parameters(teacher.model_type):
        return (
            f"teacher.parallelism: layers of {teacher.name} share parameters, which fsdp cannot shard; "
            "set teacher.ranks_per_replica=1"
        )
    if teacher.quantization:
        return (
            f"teacher.parallelism: fsdp cannot shard the {teacher.quantization} weights of {teacher.name}; "
            "use pipeline, or teacher.ranks_per_replica=1"
        )
    return None


def _why_no_tensor(ranks: int, teacher: TeacherFacts) -> str | None:
    if teacher.gguf:
        return "teacher.parallelism: tensor reads slices of safetensors files, and this is a GGUF file; use fsdp"
    if teacher.quantization:
        return (
            f"teacher.parallelism: tensor cannot cut the {teacher.quantization} weights of {teacher.name}; "
            "use pipeline, or teacher.ranks_per_replica=1"
        )
    plan = tensor_plan(teacher.model_type)
    if not plan:
        return (
            f"teacher.parallelism: transformers has no tensor-parallel plan for the layers of "
            f"{teacher.model_type or 'such a class'} ({teacher.name}); use pipeline or fsdp"
        )
    for name, heads in teacher.heads:
        if heads % ranks and cuts_heads(plan, name):
            return (
                f"teacher.ranks_per_replica: {ranks} tensor-parallel ranks cannot share {name}={heads} of "
                f"{teacher.name} evenly; use a number that divides it, or teacher.parallelism=pipeline"
            )
    if teacher.expert_width % ranks and plan.get("mlp.experts.gate_up_proj", "").startswith("packed"):
        return (
            f"teacher.ranks_per_replica: {ranks} tensor-parallel ranks cannot share experts of width "
            f"{teacher.expert_width} of {teacher.name} evenly; use a number that divides it, or "
            "teacher.parallelism=pipeline"
        )
    return None


def cuts_heads(plan: dict[str, str], field: str) -> bool:
    """Return whether a plan cuts the heads that `field` of a config.json counts. Gathered projections leave them
    whole."""
    projections = _KEY_PROJECTIONS if field.endswith("key_value_heads") else _QUERY_PROJECTIONS
    return any(style == "colwise" and name.rpartition(".")[2] in projections for name, style in plan.items())


def _family(model_type: str) -> str:
    return model_type.removesuffix("_text")


_RULES: dict[str, Callable[[int, TeacherFacts], str | None]] = {
    PIPELINE: _why_no_pipeline,
    FSDP: _why_no_fsdp,
    TENSOR: _why_no_tensor,
}
"""Of each parallelism: why so many ranks cannot share this teacher so."""
