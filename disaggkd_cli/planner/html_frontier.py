"""The frontier plot: peak memory of one rank against the micro-batch, a line per mode, and where it meets what is
usable."""

from __future__ import annotations

import math

from disaggkd_cli.planner.fit import roles_of, usable, with_tokens
from disaggkd_cli.planner.plan import Plan
from disaggkd_cli.planner.report_text import TITLES

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 520, 330, 52, 12, 14, 46
_LINES = {"colocated_full": "#e15759", "colocated_fused": "#b07aa1", "disaggregated_fused": "#4e79a7"}
_POINTS = 24


def frontier_svg(plan: Plan) -> str:
    """The plot as inline SVG; the horizontal axis is logarithmic."""
    farthest = max([one.max_micro_batch_tokens for one in plan.modes.values()] + [plan.work.micro_batch_tokens])
    first, last = math.log2(min(plan.work.sequence, 1024)), math.log2(farthest * 1.5)
    limit = max(term.value for one in plan.modes.values() for term in one.usable.values())
    top = 1.4 * limit
    parts = [_axes(first, last, top)]
    parts.append(_line_at(limit / top, "usable"))
    for mode, one in plan.modes.items():
        points = []
        for index in range(_POINTS + 1):
            exponent = first + (last - first) * index / _POINTS
            work = with_tokens(one.work, max(1, round(2**exponent)))
            # The role that is nearest to its limit, on the scale of the largest limit.
            peak = (
                max(rank.peak_bytes / usable(work, role).value for role, rank in roles_of(work, mode).items()) * limit
            )
            if peak > top:
                break
            points.append(f"{_x(exponent, first, last):.1f},{_y(peak / top):.1f}")
        parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{_LINES[mode]}" stroke-width="3"/>')
    now = _x(math.log2(plan.work.micro_batch_tokens), first, last)
    parts.append(f'<line x1="{now:.1f}" x2="{now:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" class="now"/>')
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{TITLES[mode]}</span>' for mode, colour in _LINES.items()
    )
    caption = (
        "Fullest rank against tokens of a micro-batch; a line ends where it leaves the plot. "
        "Dashed: what is usable, and the micro-batch of this config."
    )
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="memory against micro-batch">'
        f"{''.join(parts)}</svg>"
        f'<p class="legend">{legend}</p><figcaption>{caption}</figcaption></figure>'
    )


def _axes(first: float, last: float, top: float) -> str:
    parts = [
        f'<rect x="{_LEFT}" y="{_TOP}" width="{_WIDTH - _LEFT - _RIGHT}" '
        f'height="{_HEIGHT - _TOP - _BOTTOM}" class="frame"/>'
    ]
    every = max(1, math.ceil((last - first) / 6))
    for exponent in range(math.ceil(first), math.floor(last) + 1, every):
        x = _x(exponent, first, last)
        label = f"{2**exponent // 1024:,} k" if exponent >= 10 else str(2**exponent)
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 24}" text-anchor="middle">{label}</text>')
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" class="grid"/>')
    parts.append(
        f'<text x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 5}" text-anchor="middle">'
        "tokens of a micro-batch, per rank</text>"
    )
    step = 2 ** math.floor(math.log2(top / 2**30 / 3))
    for index in range(int(top / 2**30 // step) + 1):
        y = _y(index * step * 2**30 / top)
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 5:.1f}" text-anchor="end">{index * step:g}</text>')
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
    parts.append(f'<text x="{_LEFT + 6}" y="{_TOP + 16}">GiB</text>')
    return "".join(parts)


def _line_at(share: float, label: str) -> str:
    y = _y(share)
    return (
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="limit"/>'
        f'<text x="{_LEFT + 8}" y="{y - 6:.1f}">{label}</text>'
    )


def _x(exponent: float, first: float, last: float) -> float:
    return _LEFT + (exponent - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)


def _y(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)
