"""The table of sample texts of a run: what was asked, who wrote, and what, in `run_dir/samples.jsonl`.

The one owner of sample texts: whoever writes some hands `Sample`s to a `SamplesTable`, which keeps them, logs them and
passes them to the trackers; the report reads them here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from disaggkd_cli import files

FIXED, ON_POLICY = "fixed prompts", "on-policy"
"""Tables: what is likeliest after fixed prompts, and what the student of an on-policy run draws, as for training."""
_LOGGED = 400
"""Characters of a text that a line of the log has; the file has all of them."""

Log = Callable[[str], None]


@dataclass(frozen=True)
class Sample:
    """One text.

    Attributes:
        step: optimizer steps done when it was written.
        table: which table it belongs to: `FIXED` or `ON_POLICY`.
        prompt: what was asked, as text.
        writer: whose words they are: `teacher`, `student`, or the name of one of several.
        text: what was written.
    """

    step: int
    table: str
    prompt: str
    writer: str
    text: str

    def line(self) -> str:
        """Return it as one line for the log; line ends in texts are written out."""
        prompt = self.prompt if len(self.prompt) <= 60 else f"… {self.prompt[-58:]}"
        left = len(self.text) - _LOGGED
        more = f" … and {left} characters more" if left > 0 else ""
        return f"{self.table}, after step {self.step}: {prompt!r} → {self.writer}: {self.text[:_LOGGED]!r}{more}"


class SamplesTable:
    """Appends to `samples.jsonl`; a resumed run drops the samples of steps that it is about to do again.

    Args:
        path: the file, see `RunDirectory.samples`.
        first_step: steps already done.
        log: takes a line a sample.
        tracked: takes a step and all of its samples, for the trackers.
    """

    def __init__(
        self,
        path: Path,
        first_step: int,
        log: Log = lambda line: None,
        tracked: Callable[[int, Sequence[Sample]], None] = lambda step, samples: None,
    ) -> None:
        self._path, self._log, self._tracked = path, log, tracked
        if path.exists():
            kept = [sample for sample in read_samples(path) if first_step and sample.step <= first_step]
            files.write_text(path, "".join(_as_json(sample) for sample in kept))

    def write(self, samples: Sequence[Sample]) -> None:
        """Keep, log and track samples, all of one step."""
        if not samples:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(_as_json(sample) for sample in samples)
        for sample in samples:
            self._log(sample.line())
        self._tracked(samples[0].step, samples)


def read_samples(path: Path) -> list[Sample]:
    """Return the samples that a run has written; a last line cut off in mid-write is left out."""
    found: list[Sample] = []
    if not path.exists():
        return found
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(Sample(**json.loads(text)))
        except (ValueError, TypeError):
            break
    return found


def as_markdown(samples: Sequence[Sample]) -> str:
    """Return samples as one Markdown table, which TensorBoard and others show as it is meant."""
    rows = [f"| {_cell(one.prompt)} | {_cell(one.writer)} | {_cell(one.text)} |" for one in samples]
    return "\n".join(["| prompt | writer | text |", "|---|---|---|", *rows])


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ⏎ ")


def _as_json(sample: Sample) -> str:
    # Line separators other than \n stay escaped, so that a line of the file is a line to every reader.
    return json.dumps(asdict(sample)) + "\n"
