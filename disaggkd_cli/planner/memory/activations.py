"""What a student rank keeps for backward, and what one layer needs while its backward runs."""

from __future__ import annotations

from functools import lru_cache

from disaggkd_cli.planner.memory.layer_tensors import checkpointed_per_token, saved_per_token
from disaggkd_cli.planner.models.router import router_sizes
from disaggkd_cli.planner.models.shapes import DenseMLP, ModelShape
from disaggkd_cli.planner.terms import Term, term, total
from disaggkd_cli.planner.workload import Workload


def saved(work: Workload) -> list[Term]:
    """What all layers keep for backward."""
    terms = router_scores(work)
    tokens, hidden, b = work.micro_batch_tokens, work.student.hidden, work.student_bytes
    if work.checkpointing:
        one = checkpointed_per_token(hidden, b)
        terms.append(
            term(
                "saved activations",
                f"T * L * {one.formula}",
                one.source,
                T=tokens,
                L=len(work.student.layers),
                **one.values,
            )
        )
        return terms
    for layer, count in work.student.layer_kinds().items():
        parts = saved_per_token(layer, hidden, b, work.sequence, **_options(work))
        values = {name: value for part in parts for name, value in part.values.items()}
        formula = f"T * L * ({' + '.join(part.formula for part in parts)})"
        name = (
            "saved activations" if count == len(work.student.layers) else f"saved activations ({parts[1].name} layers)"
        )
        terms.append(term(name, formula, parts[1].source, T=tokens, L=count, **values))
    return terms


def router_scores(work: Workload) -> list[Term]:
    """What the routers' load-balancing loss keeps for backward, checkpointing or not."""
    return [_routers(work)[0]] if work.router_loss else []


def router_logits(work: Workload) -> list[Term]:
    """The scores themselves, which the forward holds until the loss is done."""
    return [_routers(work)[1]] if work.router_loss else []


def _routers(work: Workload) -> tuple[Term, Term]:
    return _of_routers(work.student, work.micro_batch_tokens, work.student_bytes)


@lru_cache(maxsize=4096)  # searches of splits ask for the same few again and again
def _of_routers(student: ModelShape, tokens: int, element_bytes: int) -> tuple[Term, Term]:
    values = {"T": tokens, "b": element_bytes, "experts": sum(router_sizes(student))}
    kept = "the softmax of each layer's scores, and one mask (models/router.py); saved tensors counted on the CPU"
    scores = term("router scores", "T * (b * experts + 4)", kept, **values)
    held = "returned by every layer; gone when the loss is done"
    return scores, term("router logits", "T * b * experts", held, **values)


def of_layers(work: Workload, layers: int) -> Term:
    """What the first layers keep when the others' backward is done."""
    return term(
        "saved activations",
        "everything * layers / L",
        "the first layers' tensors; the others' backward is done",
        everything=total(saved(work)),
        layers=min(layers, len(work.student.layers)),
        L=len(work.student.layers),
    )


def without_one_layer(work: Workload, saved: list[Term]) -> Term:
    """The same when one layer's backward is done."""
    return term(
        "saved activations",
        "everything - T * saved",
        "one layer's backward is done",
        everything=total(saved),
        T=work.micro_batch_tokens,
        saved=_layer_saved(work),
    )


def _options(work: Workload) -> dict[str, object]:
    return {"packed": work.packed, "delta_kernel": work.delta_kernel, "attention": work.student_attention}


def _layer_saved(work: Workload) -> float:
    """Bytes per token that the largest layer saves."""
    options = _options(work)
    hidden, b = work.student.hidden, work.student_bytes
    return max(
        total(saved_per_token(layer, hidden, b, work.sequence, **options)) for layer in work.student.layer_kinds()
    )


def _transient(work: Workload) -> dict[str, float]:
    """Width of the MLP whose gradients are alive beside what its layer saved."""
    widths = [
        layer.mlp.width
        if isinstance(layer.mlp, DenseMLP)
        else layer.mlp.top_k * (layer.mlp.width + work.student.hidden)
        for layer in work.student.layer_kinds()
    ]
    return {"T": work.micro_batch_tokens, "b": work.student_bytes, "h": work.student.hidden, "f": max(widths)}


def inside(work: Workload) -> list[Term]:
    """Beside all saved tensors: gradients inside the layer, and its recomputed tensors under checkpointing."""
    source = "gradients of two MLP tensors and two hidden states, before what they were saved from is gone"
    return [
        term(
            "one layer's activations",
            "T * (saved * checkpointed + 2 * b * (f + h))",
            source,
            saved=_layer_saved(work),
            checkpointed=int(work.checkpointing),
            **_transient(work),
        )
    ]


def in_one_layer(work: Workload) -> Term:
    """The layer at work: what it saved (or recomputed) and gradients in it, or at its end all its weights'
    gradients."""
    return term(
        "one layer's activations",
        "max(T * (saved + 2 * b * (f + h)), b * G * trained)",
        "saved set of the largest layer and gradients in flight; at the end of its backward its weights' "
        "gradients instead",
        saved=_layer_saved(work),
        G=work.student_parameters.largest_layer,
        trained=work.layer_trained,
        **_transient(work),
    )


def in_one_saved_layer(work: Workload) -> Term:
    """As `in_one_layer`, where the saved activations count the layer at work already."""
    return term(
        "one layer's activations",
        "max(2 * T * b * (f + h), b * G * trained - T * saved)",
        "gradients in flight; at the end of its backward its weights' gradients, less what it saved",
        saved=_layer_saved(work),
        G=work.student_parameters.largest_layer,
        trained=work.layer_trained,
        **_transient(work),
    )


def boundary(work: Workload) -> list[Term]:
    """Around the head: the final norm, and the supervised rows."""
    values = {"T": work.micro_batch_tokens, "h": work.student.hidden, "b": work.student_bytes}
    norm = "8 + b" if any(layer.float32_norm for layer in work.student.layers) else "4 + 2 * b"
    return [
        term("final norm", f"T * (({norm}) * h + 4)", "its saved tensors and the final hidden states", **values),
        term("supervised rows", "R * h * b", "gathered from the final hidden states", R=work.rows, **values),
    ]
