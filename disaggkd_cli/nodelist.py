"""SLURM's short forms of host names and of task counts, spelled out without asking `scontrol`.

The grammar is that of SLURM's manuals: names separated by commas, each with any number of bracketed sets of numbers
and ranges of numbers; leading zeros of a range's first number give the width of all of its numbers.
"""

from __future__ import annotations

import itertools
import re

MOST_HOSTS = 1_000_000
"""A list of more hosts than this is a mistake, not a cluster."""

_PIECE = re.compile(r"([^\[\],]*)(?:\[([0-9,\-]*)\])?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_hosts(text: str) -> list[str]:
    """Return the hosts of a list such as `node[01-03,7],gpu-a[1,3]`, in its order.

    Raises:
        ValueError: names what is not of that form.
    """
    hosts: list[str] = []
    for name in _split_names(text):
        hosts.extend(_expand_name(name))
        if len(hosts) > MOST_HOSTS:
            raise ValueError(f"{text!r} stands for more than {MOST_HOSTS} hosts")
    if not hosts:
        raise ValueError(f"{text!r} names no host")
    return hosts


def expand_counts(text: str) -> list[int]:
    """Return the counts of a list such as `4(x2),3`: [4, 4, 3].

    Raises:
        ValueError: names what is not of that form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        repeats = int(match[2] or 1) if match else 0
        if match is None or len(counts) + repeats > MOST_HOSTS:
            raise ValueError(f"{part!r} in {text!r} is no count such as 4 or 4(x2)")
        counts.extend([int(match[1])] * repeats)
    return counts


def _split_names(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    names, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            raise ValueError(f"the brackets in {text!r} do not match")
        if character == "," and depth == 0:
            names.append(text[start:index].strip())
            start = index + 1
    if depth:
        raise ValueError(f"the brackets in {text!r} do not match")
    names.append(text[start:].strip())
    return [name for name in names if name]


def _expand_name(name: str) -> list[str]:
    parts: list[list[str]] = []
    position = 0
    while position < len(name):
        match = _PIECE.match(name, position)
        if match is None or match.end() == position:
            raise ValueError(f"{name!r} is no host name or list of host names")
        parts.append([match[1]])
        if match[2] is not None:
            parts.append(_expand_numbers(match[2], name))
        position = match.end()
    total = 1
    for part in parts:
        total *= len(part)
    if total > MOST_HOSTS:
        raise ValueError(f"{name!r} stands for more than {MOST_HOSTS} hosts")
    return ["".join(combination) for combination in itertools.product(*parts)]


def _expand_numbers(text: str, name: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
            raise ValueError(f"{part!r} in {name!r} is no number or range of numbers")
        if dash and int(last) - int(first) >= MOST_HOSTS:
            raise ValueError(f"{part!r} in {name!r} is too long a range")
        if not dash:
            numbers.append(first)
            continue
        width = len(first)
        numbers.extend(str(number).zfill(width) for number in range(int(first), int(last) + 1))
    return numbers
