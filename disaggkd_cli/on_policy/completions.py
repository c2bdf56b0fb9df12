"""What the student wrote, and the training sequence that it becomes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from disaggkd_cli.data import IGNORE, Sequence
from disaggkd_cli.errors import UserError

_FORMAT = 1


@dataclass(frozen=True)
class Completion:
    """One completion as it was sampled.

    Attributes:
        position: of the sequence in the training stream.
        prompt: token ids that it goes on from.
        ids: token ids that were sampled; where it stopped, the last is the end token.
        stopped: whether it stopped by itself; else it was cut at `max_new_tokens`.
        entropy: sum over its tokens of the entropy, in nats, of what they were drawn from.
    """

    position: int
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    stopped: bool
    entropy: float

    @property
    def empty(self) -> bool:
        """Whether nothing was written but the end."""
        return self.stopped and len(self.ids) == 1

    @property
    def supervised_rows(self) -> int:
        """Rows that count: one for each sampled token, the end token included; none of an empty one."""
        return 0 if self.empty else len(self.ids)

    def sequence(self) -> Sequence:
        """The row that is trained on. Which tokens count is known by their place, so the end may be the padding's id.

        An empty one supervises nothing.
        """
        ids = np.asarray([*self.prompt, *self.ids], np.int32)
        labels = np.full(len(ids), IGNORE, np.int32)
        if not self.empty:
            labels[len(self.prompt) - 1 : -1] = self.ids
        return Sequence(ids, labels, (len(ids),), written=True)


def as_text(completions: Iterable[Completion]) -> str:
    """Completions as JSON, for a checkpoint."""
    rows = [[one.position, one.prompt, one.ids, one.stopped, one.entropy] for one in completions]
    return json.dumps({"format": _FORMAT, "completions": rows}, separators=(",", ":"))


def from_text(text: str, where: str) -> list[Completion]:
    """The completions that `as_text` wrote.

    Raises:
        UserError: naming `where`, when they are not such.
    """
    try:
        found = json.loads(text)
        if found["format"] != _FORMAT:
            raise ValueError(f"format {found['format']}, but this version reads {_FORMAT}")
        return [
            Completion(int(position), tuple(map(int, prompt)), tuple(map(int, ids)), bool(stopped), float(entropy))
            for position, prompt, ids, stopped, entropy in found["completions"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{where}: is damaged ({type(error).__name__}: {error})") from None
