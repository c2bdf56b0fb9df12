"""A teacher as a pipeline: which layers each stage takes, how long the slowest takes, and what the fullest holds."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

from disaggkd_cli.layouts.stages import divide_layers, heaviest
from disaggkd_cli.planner.models.parameters import count_parameters, layer_parameters
from disaggkd_cli.planner.models.quantised import Quantised, backbone_bytes
from disaggkd_cli.planner.models.shapes import ModelShape


@lru_cache(maxsize=256)
def division(shape: ModelShape, stages: int) -> tuple[tuple[int, int], ...]:
    """`(start, stop)` of each stage's layers, by the parameters that a token is multiplied with.

    Ranks beyond the number of layers would have none; such a layout is refused (see `layouts`).
    """
    count, stages = len(shape.layers), min(stages, len(shape.layers))
    if len(set(_weights(shape))) > 1:
        return divide_layers(_weights(shape), stages)
    # Equal layers: as `divide_layers` divides them, at once.
    sizes = [count // stages + (stage < count % stages) for stage in range(stages)]
    stops = tuple(accumulate(sizes))
    return tuple(zip((0, *stops[:-1]), stops, strict=True))


def slowest_share(shape: ModelShape, stages: int) -> float:
    """The slowest stage's share of the whole forward."""
    weights = _weights(shape)
    return heaviest(weights, division(shape, stages)) / sum(weights)


@lru_cache(maxsize=256)
def fullest_stage(shape: ModelShape, stages: int, element_bytes: int = 2, quantised: Quantised | None = None) -> float:
    """Bytes of the stage that holds most: its layers, and embedding or final norm at the ends."""
    counted = count_parameters(shape)
    sizes = backbone_bytes(shape, element_bytes, quantised)
    held = [sum(sizes[start:stop]) for start, stop in division(shape, stages)]
    held[0] += element_bytes * counted.embedding
    held[-1] += element_bytes * counted.final_norm
    return max(held)


@lru_cache(maxsize=64)
def _weights(shape: ModelShape) -> tuple[float, ...]:
    active = {layer: layer_parameters(layer, shape.hidden, active=True) for layer in shape.layer_kinds()}
    return tuple(float(active[layer]) for layer in shape.layers)
