"""Do a model's files hold the tensors that its configuration describes, all of them and no others?"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import nn

from disaggkd_cli.errors import UserError

_NAMED = 4
"""How many tensors a message names."""

HARMLESS = re.compile(
    r"(^|\.)(mtp|mtp_\w+|nextn\w*)\."  # multi-token prediction
    r"|(^|\.)(visual|vision\w*|image\w*|multi_modal\w*|mm_\w+|audio\w*|speech\w*|embed_vision|embed_audio)\b"
    r"|rotary\w*\.(inv_freq|\w+_cached)$"
    r"|\.attn\.(bias|masked_bias)$|\.attention\.(bias|masked_bias)$"  # causal masks that older files carry
    r"|(^|\.)position_ids$"
)
"""Names of tensors that a decoder of text may leave out: towers of other media, further heads, buffers."""

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|decoder)\.(\d+)\.")


def verify_tensors(model: nn.Module, found: dict[str, Any], name: str, shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuse files that lack tensors of `model`, hold some of other shapes, or hold parts of a decoder that it lacks.

    Args:
        model: as it was built from its configuration.
        found: what `from_pretrained(output_loading_info=True, ignore_mismatched_sizes=True)` tells: `missing_keys`,
            `unexpected_keys`, `mismatched_keys` (name, shape in the files, shape in the model).
        name: what messages call the model, such as `teacher.model: DIR`.
        shapes: of the tensors in the files by name, where they are known.

    Raises:
        UserError: naming the tensors with their shapes.
    """
    kind = model.config.model_type
    wanted = {key: tuple(one.shape) for key, one in model.named_parameters(remove_duplicate=False)}
    missing = sorted(found["missing_keys"], key=_in_order)
    if missing:
        raise UserError(
            f"{name} lacks {len(missing)} tensors of a {kind} model: "
            f"{_some(f'{key} {wanted[key]}' if key in wanted else key for key in missing)}; is it a complete causal "
            "language model, and are all of its files there?"
        )
    differing = sorted(found["mismatched_keys"], key=lambda one: _in_order(one[0]))
    if differing:
        told = (
            f"{key} is {tuple(there)} in the files and {tuple(here)} by config.json" for key, there, here in differing
        )
        raise UserError(
            f"{name}: {len(differing)} tensors have other shapes than its config.json says: {_some(told)}; take the "
            "config.json that belongs to these weights"
        )
    extra = sorted((key for key in found["unexpected_keys"] if not _harmless(key, model)), key=_in_order)
    decoder = [key for key in extra if _LAYER.search(key)]
    if decoder:
        told = _some(_with_shape(key, shapes) for key in decoder)
        raise UserError(
            f"{name}: its files hold {len(decoder)} tensors of decoder layers for which a {kind} model of this "
            f"config.json has no place: {told}{_layers_remark(decoder, model)}"
        )
    if extra:
        logging.getLogger("disaggkd").warning(
            "%s: %d tensors of its files are not used by a %s model: %s", name, len(extra), kind,
            _some(_with_shape(key, shapes) for key in extra),
        )  # fmt: skip


def odd_tensors(shapes: dict[str, tuple[int, ...]]) -> str:
    """Return which tensors differ in shape from their like in other places of the model, or an empty text.

    Experts that are stored one by one are put together when they are loaded, which fails where they differ.

    Args:
        shapes: of the tensors in the files by name.
    """
    alike: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        alike.setdefault(re.sub(r"\.\d+\.", ".#.", name), {})[name] = shape
    odd = []
    for group in alike.values():
        usual, count = Counter(group.values()).most_common(1)[0]
        if 1 < count < len(group):
            odd += [f"{name} is {shape}, others are {usual}" for name, shape in group.items() if shape != usual]
    return _some(sorted(odd, key=_in_order))


def _harmless(key: str, model: nn.Module) -> bool:
    text = model.config.get_text_config()
    if HARMLESS.search(key):
        return True
    if key.endswith("lm_head.weight") and getattr(text, "tie_word_embeddings", False):
        return True
    layer, further = _LAYER.search(key), getattr(text, "num_nextn_predict_layers", None) or 0
    return bool(layer) and 0 <= int(layer.group(1)) - text.num_hidden_layers < further


def _layers_remark(keys: list[str], model: nn.Module) -> str:
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    last = max(int(_LAYER.search(key).group(1)) for key in keys)
    if count is None or last < count:
        return "; take the config.json that belongs to these weights"
    return f"; it says num_hidden_layers={count}, but the files hold layers up to number {last}, counted from 0"


def _with_shape(key: str, shapes: dict[str, tuple[int, ...]]) -> str:
    return f"{key} {shapes[key]}" if key in shapes else key


def _some(told: Iterable[str]) -> str:
    every = list(told)
    rest = len(every) - _NAMED
    return ", ".join(every[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _in_order(key: str) -> list[tuple[int, str]]:
    """Sort layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in key.split(".")]
