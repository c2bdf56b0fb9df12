"""Draw how teacher and student overlap, from what runs recorded: one panel a run, a lane a rank.

    disaggkd run configs/two-cores.yaml log.timeline=true run_dir=runs/overlap train.steps=8
    disaggkd run configs/two-cores.yaml log.timeline=true run_dir=runs/alone train.steps=8 mode=colocated
    python scripts/overlap_picture.py runs/alone runs/overlap --steps 4 5 --output docs/overlap.svg

Both panels have one scale of time and begin where the student begins the first step that is shown. A tick above a lane
of the student is a request that it sends; a thin line leads from a forward's end to where its hidden states are used.
"""

from __future__ import annotations

import argparse
import sys
from html import escape
from pathlib import Path

from disaggkd_cli.config import Config, load
from disaggkd_cli.training.run_directory import RunDirectory
from disaggkd_cli.training.timeline import ASK, EVALUATE, FORWARD, TRAIN, UPDATE, WAIT, Span, read_timeline

WIDTH, LEFT, RIGHT, LANE, BAR = 860, 110, 20, 46, 26
COLOURS = {FORWARD: "#b07aa1", TRAIN: "#4e79a7", UPDATE: "#76b7b2", WAIT: "#e15759", EVALUATE: "#9c9c9c"}
INK, DIM = "#1c2530", "#6b7785"


class Panel:
    """The spans of one run between the begin of its first shown step and the end of its last one, from second 0."""

    def __init__(self, root: Path, first: int, last: int) -> None:
        directory = RunDirectory(root)
        self.config: Config = load(directory.config)
        every = read_timeline(directory.logs)
        student = every.get("student_0", [])
        updates = [span for span in student if span.what == UPDATE]
        if len(updates) < last:
            raise SystemExit(
                f"{root}: {len(updates)} steps are recorded, {last} are asked for; run it with log.timeline"
            )
        before = [span for span in student if first > 1 and span.end <= updates[first - 2].end]
        begin = before[-1].end if before else student[0].start
        self.seconds = updates[last - 1].end - begin
        self.lanes = {
            name.replace("_", " "): [
                Span(span.what, span.start - begin, span.end - begin, span.request)
                for span in spans
                if span.end > begin and span.start < begin + self.seconds
            ]
            for name, spans in every.items()
        }

    @property
    def colocated(self) -> bool:
        """Whether a wait is the teacher's own forward on these ranks."""
        return self.config.mode == "colocated"

    def share(self, lane: str, what: str) -> float:
        """Return the share of the time shown that a lane spends on one kind of work."""
        spent = sum(min(s.end, self.seconds) - max(s.start, 0.0) for s in self.lanes[lane] if s.what == what)
        return spent / self.seconds

    def title(self, steps: int) -> str:
        """Say what the panel shows, and the shares that it comes to."""
        if self.colocated:
            where, busy = "colocated: one rank does both in turn", f"teacher {self.share('student 0', WAIT):.0%}"
        else:
            where = "disaggregated: the teacher works on what comes next while the student trains"
            shares = self.share("teacher 0", FORWARD), self.share("student 0", WAIT)
            busy = f"teacher busy {shares[0]:.0%}, student waits {shares[1]:.0%}"
        return f"{where}; {steps} steps in {self.seconds:.2f} s ({busy} of it)"


def picture(panels: list[Panel], steps: int) -> str:
    """Return the SVG."""
    longest = max(panel.seconds for panel in panels)
    scale = (WIDTH - LEFT - RIGHT) / longest
    parts, y = [], 20.0
    for panel in panels:
        where, shares = panel.title(steps).split("; ")
        parts += [_text(16, y, where, 13), _text(16, y + 17, shares, 12, colour=DIM)]
        y += 34
        places = {}
        for name in sorted(panel.lanes, key=lambda name: not name.startswith("teacher")):
            places[name] = y
            parts.append(_text(LEFT - 10, y + BAR / 2 + 5, name, 13, "end"))
            parts += [_bar(span, y, scale, panel) for span in panel.lanes[name] if span.what in COLOURS]
            parts += [_tick(span, y, scale) for span in panel.lanes[name] if span.what == ASK and span.start >= 0]
            y += LANE
        parts += _handed_over(panel, places, scale)
        y += 12
    seconds = longest / 5
    for index in range(6):
        x = LEFT + index * seconds * scale
        parts.append(_text(x, y + 4, f"{index * seconds:.1f} s", 11, "middle", DIM))
    y += 30
    parts.append(_legend(y))
    height = int(y + 34)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="teacher and student over time" font-family="system-ui, sans-serif">'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _bar(span: Span, y: float, scale: float, panel: Panel) -> str:
    what = FORWARD if span.what == WAIT and panel.colocated else span.what
    left, right = max(0.0, span.start), min(span.end, panel.seconds)
    request = "" if span.request is None else f", request {span.request}"
    return (
        f'<rect x="{LEFT + left * scale:.1f}" y="{y:.0f}" width="{max(0.4, (right - left) * scale - 0.6):.1f}" '
        f'height="{BAR}" fill="{COLOURS[what]}"><title>{what}{request}: {1000 * (span.end - span.start):.0f} ms</title>'
        "</rect>"
    )


def _tick(span: Span, y: float, scale: float) -> str:
    x = LEFT + span.start * scale
    return f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 7:.0f}" y2="{y - 1:.0f}" stroke="{INK}" stroke-width="1.2"/>'


def _handed_over(panel: Panel, places: dict[str, float], scale: float) -> list[str]:
    """Lines from the end of a forward to the begin of the training on it."""
    trained = {span.request: span for span in panel.lanes["student 0"] if span.what == TRAIN}
    lines = []
    for name, spans in panel.lanes.items():
        for span in spans:
            used = trained.get(span.request)
            if span.what == FORWARD and used is not None and 0 <= span.end and used.start <= panel.seconds:
                x1, x2 = LEFT + span.end * scale, LEFT + used.start * scale
                lines.append(
                    f'<line x1="{x1:.1f}" y1="{places[name] + BAR:.0f}" x2="{x2:.1f}" y2="{places["student 0"]:.0f}" '
                    f'stroke="{DIM}" stroke-width="0.7"/>'
                )
    return lines


def _legend(y: float) -> str:
    names = (
        ("teacher's forward", FORWARD), ("student trains on a micro-batch", TRAIN), ("optimizer", UPDATE),
        ("student waits", WAIT),
    )  # fmt: skip
    x, parts = 16.0, []
    for name, what in names:
        parts.append(f'<rect x="{x:.0f}" y="{y - 10:.0f}" width="11" height="11" fill="{COLOURS[what]}"/>')
        parts.append(_text(x + 16, y, name, 12))
        x += 36 + 6.6 * len(name)
    parts.append(_text(16, y + 18, "tick: a request is sent; line: hidden states lie ready", 12, colour=DIM))
    return "\n".join(parts)


def _text(x: float, y: float, text: str, size: int, anchor: str = "start", colour: str = INK) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
    return f"<text {place}>{escape(text)}</text>"


def main() -> int:
    """Read the runs and write the picture."""
    parser = argparse.ArgumentParser(description="Draw how teacher and student overlap.")
    parser.add_argument("runs", nargs="+", type=Path, help="run directories of runs with log.timeline=true")
    parser.add_argument("--steps", nargs=2, type=int, default=(4, 5), metavar=("FIRST", "LAST"))
    parser.add_argument("--output", type=Path, default=Path("docs/overlap.svg"))
    options = parser.parse_args()
    first, last = options.steps
    panels = [Panel(root, first, last) for root in options.runs]
    options.output.write_text(picture(panels, last - first + 1), encoding="utf-8")
    print(f"wrote {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
