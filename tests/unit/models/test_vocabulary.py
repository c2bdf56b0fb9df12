"""The texts may use only the ids that both tokenizers know."""

import numpy as np
import pytest

from disaggkd_cli.errors import UserError
from disaggkd_cli.models import verify_ids


def test_padding_of_the_heads_is_no_matter():
    assert verify_ids(np.array([1, 5, 9]), np.array([5, 9, -100]), 10, (16, 10)) == 9


def test_an_added_token_that_is_supervised():
    with pytest.raises(UserError, match=r"data.train: 1 tokens \(1 of them supervised\) have ids from 10 on, up to 10"):
        verify_ids(np.array([1, 10]), np.array([10, -100]), 10, (16, 16))


def test_an_added_token_in_a_prompt():
    with pytest.raises(UserError, match=r"1 tokens \(0 of them supervised\)"):
        verify_ids(np.array([10, 2]), np.array([2, -100]), 10, (16, 16))


def test_a_head_without_room_for_its_tokenizer():
    with pytest.raises(UserError, match="8 .teacher. and 10 .student. ids, fewer than the 10"):
        verify_ids(np.array([1]), np.array([2]), 10, (8, 10))
