from __future__ import annotations

import pytest
from hypothesis import settings
from transformers import PreTrainedTokenizerFast

from .support import build_byte_tokenizer, build_word_tokenizer

settings.register_profile("no deadline", deadline=None)  # no clock decides a test
settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    return build_byte_tokenizer()


@pytest.fixture(scope="session")
def word_tokenizer() -> PreTrainedTokenizerFast:
    return build_word_tokenizer()
