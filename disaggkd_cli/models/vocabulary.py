"""May the texts use the ids that they use? Only those that mean the same token to teacher and student."""

from __future__ import annotations

import numpy as np

from disaggkd_cli.errors import UserError


def verify_ids(input_ids: np.ndarray, labels: np.ndarray, shared: int, head_sizes: tuple[int, int]) -> int:
    """Return the largest token id of the texts, which lies among those that both sides know.

    A tokenizer may know more tokens than its model's head, as long as the texts do not use them.

    Args:
        input_ids, labels: [T] of a tokenized dataset; labels of -100 do not count.
        shared: ids, from 0, that mean the same to both tokenizers.
        head_sizes: ids that the teacher's and the student's head hold.

    Raises:
        UserError: the texts use ids that one of the tokenizers, or one of the heads, does not have.
    """
    known = min(shared, *head_sizes)
    largest = int(max(input_ids.max(initial=0), labels.max(initial=0)))
    if largest >= known:
        total, supervised = int((input_ids >= known).sum()), int((labels >= known).sum())
        limits = f"tokenizers {shared}, teacher's head {head_sizes[0]}, student's head {head_sizes[1]}"
        raise UserError(
            f"data.train: {total} tokens ({supervised} of them supervised) have ids from {known} on, up to {largest}, "
            f"which not both sides know ({limits}); the teacher can say nothing about them: leave the added tokens out "
            "of the texts, or take a teacher and a student of one vocabulary"
        )
    return largest
