"""What each rank of a tensor-parallel replica holds whole: all that transformers' plan for the class does not name."""

from __future__ import annotations

from collections.abc import Iterator

from disaggkd_cli.layouts import Layout, tensor_plan
from disaggkd_cli.layouts.rules import cuts_heads
from disaggkd_cli.planner.models.parameters import count_parameters
from disaggkd_cli.planner.models.shapes import DenseMLP, LayerShape, ModelShape
from disaggkd_cli.planner.models.trained import linear_layers

_CUT = ("colwise", "rowwise", "packed_colwise", "packed_rowwise", "colwise_gather_output", "rowwise_split_input")
"""Styles that leave each rank a slice of the weight. A gathered output is whole again, its weight is not."""
_SUMMED = ("rowwise", "rowwise_split_input", "moe_tp_experts", "all_reduce")
"""Styles whose outputs are partial sums that all ranks add up."""
_GATHERED = ("colwise_gather_output",)
"""Styles whose outputs are slices that all ranks put together."""


def whole_parameters(shape: ModelShape) -> int:
    """Parameters of the backbone that every rank holds whole: embedding, norms, routers, and what the plan leaves out.

    All of them where there is no plan.
    """
    plan = tensor_plan(shape.model_type) or {}
    cut = sum(_cut_parameters(layer, shape.hidden, plan) * count for layer, count in shape.layer_kinds().items())
    return count_parameters(shape).backbone - cut


def whole_share(shape: ModelShape) -> float:
    """Share of the matrix products of a token's forward that every rank computes whole."""
    plan = tensor_plan(shape.model_type) or {}
    cut = sum(
        _cut_parameters(layer, shape.hidden, plan, active=True) * count for layer, count in shape.layer_kinds().items()
    )
    return 1 - cut / count_parameters(shape).active_layers


def cut_ranks(shape: ModelShape, layout: Layout) -> tuple[int, int]:
    """Ranks that share the attention's heads, and the MLP's width, of each layer."""
    if layout.kind != "tensor":
        return 1, 1
    plan = tensor_plan(shape.model_type) or {}
    heads = cuts_heads(plan, "num_attention_heads")
    width = any(
        style in ("colwise", "packed_colwise", "packed_rowwise") for name, style in plan.items() if "up" in name
    )
    return layout.ranks if heads else 1, layout.ranks if width else 1


def collective_elements(shape: ModelShape) -> int:
    """Elements of a token that ranks reduce or gather in one forward; a sum counts twice (scattered, then gathered)."""
    plan = tensor_plan(shape.model_type) or {}
    total = 0
    for layer, count in shape.layer_kinds().items():
        elements = 0
        for names, _, outputs in _matrices(layer, shape.hidden):
            style = _style(names, plan)
            elements += outputs * (2 if style in _SUMMED else 1 if style in _GATHERED else 0)
        if not isinstance(layer.mlp, DenseMLP) and _style(_experts(""), plan) in _SUMMED:
            elements += 2 * shape.hidden
        total += elements * count
    return total


def _cut_parameters(layer: LayerShape, hidden: int, plan: dict[str, str], active: bool = False) -> int:
    cut = sum(inputs * outputs for names, inputs, outputs in _matrices(layer, hidden) if _style(names, plan) in _CUT)
    mlp = layer.mlp
    if not isinstance(mlp, DenseMLP):
        for name, width in (("gate_up_proj", 2 * mlp.width), ("down_proj", mlp.width)):
            if _style(_experts(f".{name}"), plan) in _CUT:
                cut += (mlp.top_k if active else mlp.experts) * hidden * width
    return cut


def _matrices(layer: LayerShape, hidden: int) -> Iterator[tuple[tuple[str, ...], int, int]]:
    """Each `nn.Linear` of a layer under the names that classes give it, with its inputs and outputs."""
    for name, inputs, outputs in linear_layers(layer, hidden):
        if not name.startswith("mlp.shared."):
            yield (name, name.replace("mlp.", "feed_forward.")), inputs, outputs
            continue
        leaf = name.rpartition(".")[2]
        owners = ("mlp.shared_expert", "mlp.shared_experts", "mlp.shared_mlp", "feed_forward.shared_expert")
        yield tuple(f"{owner}.{leaf}" for owner in owners), inputs, outputs


def _experts(leaf: str) -> tuple[str, ...]:
    return tuple(f"{owner}.experts{leaf}" for owner in ("mlp", "feed_forward", "block_sparse_moe"))


def _style(names: tuple[str, ...], plan: dict[str, str]) -> str | None:
    return next((plan[name] for name in names if name in plan), None)
