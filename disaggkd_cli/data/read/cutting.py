"""Cut a long text into pieces that become, one after the other, the same tokens as the whole.

A text is cut only before white space that follows a letter, and only where tokenising the CONTEXT characters on both
sides apart gives the same ids as tokenising them together. That makes pieces exact for every tokenizer whose decision
at a place depends on less than CONTEXT characters around it, which holds for those that split words first. Tokenizers
that mark the beginning of a text (SentencePiece's "▁") fail the test everywhere, so their texts stay whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PIECE_CHARACTERS = 1 << 18
CONTEXT = 256
_TRIES = 64
_BEFORE_SPACE = re.compile(r"(?<=[^\W\d_])(?=\s)")


class TextCutter:
    """Finds where a text may be cut."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, may_cut: bool = True, piece_characters: int = PIECE_CHARACTERS
    ):
        """`may_cut`: False where it is known that no cut is exact. `piece_characters`: about the length of a piece."""
        self._tokenizer = tokenizer
        self._may_cut = may_cut
        self.piece_characters = piece_characters

    def cut(self, text: str) -> int | None:
        """Where to end the first piece of `text`; None: no place is safe, or what would be left is not worth it."""
        if not self._may_cut or len(text) < 2 * self.piece_characters:
            return None
        for tried, place in enumerate(_BEFORE_SPACE.finditer(text, self.piece_characters)):
            if tried == _TRIES or place.start() + CONTEXT > len(text):
                return None
            if self._is_exact(text, place.start()):
                return place.start()
        return None

    def pieces(self, text: str) -> Iterator[str]:
        """Yield the pieces of a text, which together are the text."""
        start = 0
        # A window, so that each step costs what a piece costs and not what the rest of the text does.
        window = 4 * self.piece_characters + CONTEXT
        while (at := self.cut(text[start : start + window])) is not None:
            yield text[start : start + at]
            start += at
        yield text[start:]

    def _is_exact(self, text: str, at: int) -> bool:
        # Line ends are brought to \n before tokenising, wherever the text comes from.
        left, right = text[max(0, at - CONTEXT) : at], text[at : at + CONTEXT]
        left, right = left.replace("\r\n", "\n"), right.replace("\r\n", "\n")
        apart = self._ids(left) + self._ids(right)
        return self._ids(left + right) == apart

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
