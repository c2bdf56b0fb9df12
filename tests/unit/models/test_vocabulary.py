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


def test_a_tokenizer_with_more_tokens_than_the_head():
    assert verify_ids(np.array([1, 7]), np.array([7, -100]), 10, (8, 10)) == 7
    with pytest.raises(UserError, match="from 8 on, up to 8, .* teacher's head 8, student's head 10"):
        verify_ids(np.array([1, 8]), np.array([8, -100]), 10, (8, 10))
