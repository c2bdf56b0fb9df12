"""What the student is asked to go on from: the prompt within a training sequence, read off its labels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from disaggkd_cli.data import IGNORE, Sequence, TokenizedDataset
from disaggkd_cli.errors import UserError

_REFUSED_SHARE = 0.05
"""Share of prompts without room above which the user is asked rather than told."""


def prompt_length(labels: np.ndarray, prompt_tokens: int) -> int:
    """Return how many of a sequence's first tokens are its prompt.

    Running text is supervised from its first token on and gives its first `prompt_tokens`, never its last token. Where
    prompts are masked (pairs, conversations) the prompt ends where the last supervised stretch begins: of a
    conversation all turns up to the last answer, and what the template puts before an answer.

    Args:
        labels: [L] next-token labels of one document, at least one of them supervised.
    """
    supervised = labels != IGNORE
    if supervised[0]:
        return max(1, min(prompt_tokens, len(labels) - 1))
    begins = np.flatnonzero(supervised[1:] & ~supervised[:-1])
    # A label stands on the token before it, so the token that carries the first label is the prompt's last.
    return int(begins[-1]) + 2


def prompt_of(sequence: Sequence, prompt_tokens: int) -> np.ndarray:
    """Return the prompt's ids, [P] int32, of a sequence that holds one document."""
    return sequence.input_ids[: prompt_length(sequence.labels, prompt_tokens)]


@dataclass(frozen=True)
class Room:
    """How much of a row prompt and completion may take.

    Attributes:
        sequence_length: of a row, in tokens.
        max_new_tokens: of a completion.
        prompt_tokens: of a running text's prompt.
    """

    sequence_length: int
    max_new_tokens: int
    prompt_tokens: int

    def has(self, sequence: Sequence) -> bool:
        """Whether a whole completion fits behind the prompt."""
        return prompt_length(sequence.labels, self.prompt_tokens) + self.max_new_tokens <= self.sequence_length


def with_room(dataset: TokenizedDataset, room: Room) -> tuple[np.ndarray, str]:
    """Return which sequences have room for a completion, [N] int64, and a line about those that have none.

    Raises:
        UserError: more than one in twenty have none.
    """
    kept = np.array([room.has(dataset.sequence(index)) for index in range(len(dataset))], bool)
    dropped = int((~kept).sum())
    if not dropped:
        return np.flatnonzero(kept), ""
    what = (
        f"{dropped} of {len(kept)} prompts leave no room for on_policy.max_new_tokens={room.max_new_tokens} within "
        f"data.sequence_length={room.sequence_length}"
    )
    if dropped > _REFUSED_SHARE * len(kept):
        raise UserError(f"on_policy.max_new_tokens: {what}; lower it, or raise data.sequence_length")
    return np.flatnonzero(kept), f"{what} and are left out"
