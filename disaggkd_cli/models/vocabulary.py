"""May the texts use the ids that they use? Only those that mean the same token to teacher and student."""

from __future__ import annotations

import numpy as np

from disaggkd_cli.errors import UserError


def verify_ids(input_ids: np.ndarray, labels: np.ndarray, shared: int, head_sizes: tuple[int, int]) -> int:
    """Return the largest token id of the texts, which lies among the shared ones.

    Args:
        input_ids, labels: [T] of a tokenized dataset; labels of -100 do not count.
        shared: ids, from 0, that mean the same to both tokenizers.
        head_sizes: ids that the teacher's and the student's head hold.

    Raises:
        UserError: a head is too small, or the texts use ids that only one of the tokenizers has.
    """
    if min(head_sizes) < shared:
        raise UserError(
            f"the heads hold {head_sizes[0]} (teacher) and {head_sizes[1]} (student) ids, fewer than the {shared} that "
            "the tokenizers share; take the tokenizer that belongs to the models"
        )
    largest = int(max(input_ids.max(initial=0), labels.max(initial=0)))
    if largest >= shared:
        supervised = int((labels >= shared).sum())
        raise UserError(
            f"data.train: {int((input_ids >= shared).sum())} tokens ({supervised} of them supervised) have ids from "
            f"{shared} on, up to {largest}, which only one of the two tokenizers knows; the teacher can say nothing "
            "about them: leave the added tokens out of the texts, or take a teacher and a student of one tokenizer"
        )
    return largest
