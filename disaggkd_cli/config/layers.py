"""The words of `student.from_teacher.layers`: which of a teacher's layers a student keeps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from disaggkd_cli.errors import UserError

KEY = "student.from_teacher.layers"
_EVERY = re.compile(r"every_([1-9][0-9]*)")
_BEST = re.compile(r"best_([1-9][0-9]*)")


def best_count(layers: Any) -> int | None:
    """Return N where `layers` is `best_N`, whose layers are chosen on the run's own texts; otherwise None."""
    match = _BEST.fullmatch(layers) if isinstance(layers, str) else None
    return int(match.group(1)) if match else None


def layer_numbers(layers: str | list[int], count: int) -> list[int]:
    """Return the numbers of the kept layers of a teacher with `count`: `every_2` of 5 is [0, 2, 4].

    Raises:
        UserError: a number is not below `count`, or there are not so many layers.
    """
    best = best_count(layers)
    if best is not None:
        raise UserError(f"{KEY}: {layers} is settled when a run starts; name the layers, or every_N")
    if isinstance(layers, str):
        return list(range(0, count, int(layers.removeprefix("every_"))))
    if max(layers) >= count:
        raise UserError(f"{KEY}: {max(layers)} is not there; the teacher has layers 0 to {count - 1}")
    return list(layers)


def expected_layers(layers: str | list[int], count: int) -> list[int]:
    """Return `layer_numbers`, and for `best_N` as many layers, evenly spread: what a plan counts before the choice.

    Raises:
        UserError: see `layer_numbers`; or `best_N` with N above `count`.
    """
    best = best_count(layers)
    if best is None:
        return layer_numbers(layers, count)
    require_enough(best, count)
    return sorted({round(index * (count - 1) / max(1, best - 1)) for index in range(best)})


def require_enough(best: int, count: int) -> None:
    """Refuse `best_N` where the teacher has fewer layers.

    Raises:
        UserError: saying how many there are.
    """
    if best > count:
        raise UserError(f"{KEY}: best_{best} is more than there are; the teacher has {count} layers")


def problems(layers: Any) -> Iterator[str]:
    """Yield what is wrong with the value as it is written."""
    if isinstance(layers, str):
        if not (_EVERY.fullmatch(layers) or _BEST.fullmatch(layers)):
            yield (
                f"{KEY}: {layers!r} must be every_N (every_2 keeps 0, 2, 4, …), best_N (the N whose loss hurts most, "
                "found on the run's texts) or a list of layer numbers"
            )
    elif isinstance(layers, list):
        numbers = [layer for layer in layers if isinstance(layer, int) and not isinstance(layer, bool) and layer >= 0]
        if not layers or len(numbers) != len(layers) or sorted(set(numbers)) != layers:
            yield f"{KEY}: {layers} must be rising layer numbers, such as [0, 2, 5]"
    else:
        yield f"{KEY}: must say which layers to keep: every_2, best_20, or a list such as [0, 2, 5]"
