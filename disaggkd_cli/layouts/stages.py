"""How the layers of a teacher are divided into the stages of a pipeline. No torch: plans and runs divide alike."""

from __future__ import annotations

from collections.abc import Sequence

WORTH_MOVING = 0.05
"""Layers move to another stage where the slowest one becomes faster by more than this."""


def divide_layers(
    weights: Sequence[float], stages: int, *, before: float = 0.0, after: float = 0.0
) -> tuple[tuple[int, int], ...]:
    """Divide layers into consecutive runs so that the heaviest stage is as light as it can be.

    Among the divisions whose heaviest stage is the lightest, the one whose squares of weights sum to least is taken,
    so that the others are even too. Equal weights give the first stages the surplus layers.

    Args:
        weights: of each layer, in any unit (seconds, FLOPs, bytes).
        stages: how many; each gets at least one layer.
        before: what the first stage carries besides (embeddings).
        after: what the last one carries besides.

    Returns:
        `(start, stop)` of each stage; together they are all layers, each once.

    Raises:
        ValueError: more stages than layers, none of either, or a negative weight.
    """
    count = len(weights)
    if not 1 <= stages <= count:
        raise ValueError(f"{count} layers cannot be divided into {stages} stages")
    if min(*weights, before, after, 0.0) < 0:
        raise ValueError("a layer weighs less than nothing")
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)

    def load(stage: int, start: int, stop: int) -> float:
        carried = sums[stop] - sums[start]
        return carried + (before if stage == 0 else 0.0) + (after if stage == stages - 1 else 0.0)

    most = _no_heavier_than(weights, stages, before, after)
    # best[stop]: of all divisions of the layers up to `stop`, (heaviest stage, sum of squares, starts of its stages).
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(stages):
        further: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for stop in range(stage + 1, count - (stages - stage - 1) + 1):
            found = []
            for start in range(stop - 1, stage - 1, -1):
                mine = load(stage, start, stop)
                if mine > most:
                    break
                if start in best:
                    heaviest, squares, starts = best[start]
                    found.append((max(heaviest, mine), squares + mine * mine, (*starts, start)))
            if found:
                further[stop] = min(found, key=_merit) if len(found) > 1 else found[0]
        best = further
    starts = best[count][2]
    return tuple(zip(starts, (*starts[1:], count), strict=True))


def _merit(one: tuple[float, float, tuple[int, ...]]) -> tuple[float, float, list[int]]:
    """The order of divisions: heaviest stage, sum of squares, late starts."""
    return _rounded(one[0]), _rounded(one[1]), [-start for start in one[2]]


def _no_heavier_than(weights: Sequence[float], stages: int, before: float, after: float) -> float:
    """A weight, a hair above the least, that some division's heaviest stage keeps to; found by halving."""
    low, high = 0.0, before + sum(weights) + after
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if _possible(weights, stages, before, after, middle) else (middle, high)
    return high * (1 + 1e-9)


def _possible(weights: Sequence[float], stages: int, before: float, after: float, most: float) -> bool:
    """Whether a division exists whose stages weigh at most `most`: filled from the front, as full as they may be."""
    stage, load = 1, before
    for index, weight in enumerate(weights):
        carried = weight + (after if index == len(weights) - 1 else 0.0)
        if index and load + carried > most:
            stage, load = stage + 1, 0.0
        load += carried
        if load > most or stage > stages:
            return False
    return True


def heaviest(
    weights: Sequence[float], division: Sequence[tuple[int, int]], *, before: float = 0.0, after: float = 0.0
) -> float:
    """Return the weight of the heaviest stage of a division."""
    loads = [float(sum(weights[start:stop])) for start, stop in division]
    loads[0] += before
    loads[-1] += after
    return max(loads)


def measured_division(
    seconds: Sequence[float], division: tuple[tuple[int, int], ...]
) -> tuple[tuple[tuple[int, int], ...], float]:
    """Return the division that measured seconds of each layer ask for, and by which share its slowest stage takes less.

    It is `division` itself, and 0, where another one would be faster by no more than `WORTH_MOVING`.
    """
    better = divide_layers(seconds, len(division))
    now, then = heaviest(seconds, division), heaviest(seconds, better)
    if now <= then * (1 + WORTH_MOVING):
        return division, 0.0
    return better, 1 - then / now


def fullest(
    layer_bytes: Sequence[float],
    division: Sequence[tuple[int, int]],
    room: Sequence[float],
    *,
    before: float = 0.0,
    after: float = 0.0,
) -> tuple[int, float]:
    """Return the stage whose weights leave the least of its memory, and how many bytes it leaves (negative: too full).

    Args:
        layer_bytes: weights of each layer.
        room: free memory where each stage computes.
        before, after: weights that the first and the last stage hold besides.
    """
    held = [float(sum(layer_bytes[start:stop])) for start, stop in division]
    held[0] += before
    held[-1] += after
    left = [free - size for free, size in zip(room, held, strict=True)]
    return min(enumerate(left), key=lambda pair: pair[1])


def describe(division: Sequence[tuple[int, int]]) -> str:
    """Return a division in words, such as `layers 0-11 | 12-23`."""
    return "layers " + " | ".join(f"{start}-{stop - 1}" if stop > start + 1 else str(start) for start, stop in division)


def idle_for_want_of_requests(ring_depth: int, student_ranks: int, stages: int, replicas: int) -> str:
    """Return one line when students ask for too little at a time to keep all stages busy, else an empty text.

    Each stage works on a request of its own, so `stages × replicas` must be on their way; students ask for
    `ring_depth × student_ranks` at most.
    """
    asked, needed = ring_depth * student_ranks, stages * replicas
    if stages == 1 or asked >= needed:
        return ""
    depth = -(-needed // student_ranks)
    return (
        f"transport.ring_depth: {ring_depth} x {student_ranks} student ranks ask for {asked} requests at a time, and "
        f"{replicas} x {stages} stages of the teacher work on {needed}: some stages will be idle; set "
        f"transport.ring_depth={depth}"
    )


def _rounded(value: float) -> float:
    """Sums of the same layers differ in the last bits by the order of adding; such divisions count as equal."""
    return float(f"{value:.12g}")
