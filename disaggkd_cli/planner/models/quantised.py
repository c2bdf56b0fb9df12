"""A teacher's quantised weights, from the checkpoint's own `quantization_config`: what a rank holds of each matrix."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from disaggkd_cli.errors import UserError
from disaggkd_cli.planner.models.parameters import layer_parameters
from disaggkd_cli.planner.models.shapes import DenseMLP, LayerShape, ModelShape
from disaggkd_cli.planner.models.trained import linear_layers

_FLOAT8_GPUS = ("hopper", "ada", "blackwell", "cdna3")
"""Architectures on which transformers keeps float8 weights; elsewhere they become bfloat16 at load."""

_IGNORED = ("modules_to_not_convert", "ignore", "llm_int8_skip_modules")


@dataclass(frozen=True)
class Quantised:
    """How a teacher's matrices lie in memory.

    Attributes:
        method: as the checkpoint names it.
        weight_bytes: of one weight, its share of scales and zero points included.
        ignored: names or patterns of modules that stay as they are (`re:` starts a regular expression).
        experts_only: only routed experts are quantised (MXFP4 of gpt-oss).
    """

    method: str
    weight_bytes: float
    ignored: tuple[str, ...] = ()
    experts_only: bool = False


def quantised_of(config: Mapping[str, Any], key: str, *, architecture: str, on_cpu: bool = False) -> Quantised | None:
    """Return how the checkpoint of a parsed config.json is held, or None where it is not (or no longer) quantised.

    Args:
        config: the fields of config.json.
        key: the config key that named the model, for messages.
        architecture: of the teacher's GPU, as the catalogue has it.
        on_cpu: on CPUs float8 and MXFP4 are dequantised at load.

    Raises:
        UserError: a method that the planner does not know.
    """
    found = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not found:
        return None
    method = str(found.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in found else "")).lower()
    ignored = tuple(
        found.get("modules_to_not_convert") or found.get("ignore") or found.get("llm_int8_skip_modules") or ()
    )
    if method in ("awq", "gptq"):
        bits, group = (
            int(found.get("bits", found.get("w_bit", 4))),
            int(found.get("group_size", found.get("q_group_size", 128))),
        )
        return Quantised(method, _grouped(bits, group, zeros=True), ignored)
    if method in ("fp8", "fbgemm_fp8"):
        kept = not on_cpu and architecture in _FLOAT8_GPUS and not found.get("dequantize")
        rows, columns = found.get("weight_block_size") or (1, 1 << 30)
        return Quantised(method, 1 + 4 / (rows * columns), ignored) if kept else None
    if method == "mxfp4":
        kept = not on_cpu and not found.get("dequantize")
        return Quantised(method, 0.5 + 1 / 32, ignored, experts_only=True) if kept else None
    if method == "bitsandbytes":
        if found.get("load_in_4bit"):
            scales = (1 + 4 / 256) / 64 if found.get("bnb_4bit_use_double_quant") else 4 / 64
            return Quantised("bitsandbytes", 0.5 + scales, ignored)
        return Quantised("bitsandbytes", 1.0, ignored)
    if method in ("compressed-tensors", "compressed_tensors"):
        weights = [group.get("weights") for group in (found.get("config_groups") or {}).values()]
        weights = [one for one in weights if one]
        if not weights:
            return None
        sizes = [_grouped(int(one["num_bits"]), int(one.get("group_size") or 0), zeros=not one.get("symmetric", True))
                 for one in weights]  # fmt: skip
        return Quantised("compressed-tensors", max(sizes), ignored)
    raise UserError(
        f"{key}: its config.json names the quantization {method or found!r}, whose size in memory the planner does not "
        "know; it knows awq, gptq, compressed-tensors, fp8, mxfp4 and bitsandbytes"
    )


def requested(kind: str) -> Quantised:
    """Weights that are quantised at load: int8, int4 (groups of 128) or fp8, matrices of the layers only."""
    return Quantised(kind, {"int8": 1.0, "fp8": 1.0, "int4": _grouped(4, 128, zeros=True)}[kind])


def layer_bytes(layer: LayerShape, index: int, hidden: int, element_bytes: int, quantised: Quantised | None) -> float:
    """Bytes of one decoder layer's parameters."""
    everything = element_bytes * layer_parameters(layer, hidden)
    if quantised is None:
        return everything
    count = quantised_parameters(layer, index, hidden, quantised)
    return everything - (element_bytes - quantised.weight_bytes) * count


def backbone_bytes(shape: ModelShape, element_bytes: int, quantised: Quantised | None) -> list[float]:
    """Bytes of each layer, in order. Embedding and norms outside of them are never quantised."""
    known: dict[tuple, float] = {}
    sizes = []
    for index, layer in enumerate(shape.layers):
        # Names carry the layer's number; where nothing is ignored all layers of a kind are alike.
        which = (layer, index if quantised and quantised.ignored else 0)
        if which not in known:
            known[which] = layer_bytes(layer, index, shape.hidden, element_bytes, quantised)
        sizes.append(known[which])
    return sizes


def quantised_parameters(layer: LayerShape, index: int, hidden: int, quantised: Quantised) -> int:
    """Weights of one layer that are quantised: those of `nn.Linear` and of routed experts, but for ignored modules."""
    count = 0
    if not isinstance(layer.mlp, DenseMLP) and not _ignored(f"model.layers.{index}.mlp.experts", quantised):
        count += 3 * hidden * layer.mlp.width * layer.mlp.experts
    if quantised.experts_only:
        return count
    for name, inputs, outputs in linear_layers(layer, hidden):
        if outputs > 1 and not _ignored(f"model.layers.{index}.{name}", quantised):
            count += inputs * outputs
    return count


def _ignored(name: str, quantised: Quantised) -> bool:
    for pattern in quantised.ignored:
        if pattern.startswith("re:"):
            if re.match(pattern[3:], name):
                return True
        elif fnmatch.fnmatch(name, pattern) or f".{pattern}." in f".{name}.":
            return True
    return False


def _grouped(bits: int, group: int, *, zeros: bool) -> float:
    """Bytes of a weight of `bits` with a 16-bit scale (and a zero point) for each group; one a row is not counted."""
    return bits / 8 + ((2 + (bits / 8 if zeros else 0)) / group if group > 0 else 0)
