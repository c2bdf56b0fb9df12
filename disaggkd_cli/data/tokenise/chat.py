"""Which tokens of a conversation count: those that the assistant says, up to and including the end of its turn.

Two ways, both through the tokenizer's chat template:
* The template marks what the assistant says with `{% generation %}`: transformers' own mask is taken.
* It does not: the assistant's turns are found in the rendered conversation, see `turns`.

The whole is tokenised as at inference (a long one in pieces that give the same tokens); characters are mapped to tokens
by the tokenizer's offsets. A token that reaches over the beginning of a turn counts, as it does in transformers' own
mask.
"""

from __future__ import annotations

import numpy as np

from disaggkd_cli.data.read.cutting import TextCutter
from disaggkd_cli.data.read.documents import Conversation
from disaggkd_cli.data.tokenise.in_pieces import ids_and_offsets_of
from disaggkd_cli.data.tokenise.template import ChatTemplate, has_generation_markers
from disaggkd_cli.data.tokenise.turns import TurnFinder


class ChatEncoder:
    """Encodes conversations by one chat template."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._cutter = TextCutter(template.tokenizer)
        self._finder = TurnFinder(template)
        self._has_markers = has_generation_markers(template.text)

    def encode(self, conversation: Conversation) -> tuple[np.ndarray, np.ndarray]:
        """Token ids [L] int32 and whether each token is one that the assistant says, and is to be learned, [L] bool.

        Raises:
            RefusedRecord: the template refuses the conversation, does not render all that the assistant says, or does
                not let it be told from the rest.
        """
        conversation = self.template.in_its_form(conversation)
        whole = self.template.render(conversation)
        left_out = conversation.untrained
        if self._has_markers:
            encoded = self.template.apply(
                conversation,
                conversation.messages,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            ids = np.asarray(encoded["input_ids"], np.int32)
            said = np.asarray(encoded["assistant_masks"], bool)
            if not left_out:
                return ids, said
            turns = self._finder.turns(conversation, whole)
            spans = [(turn.begin, turn.end) for turn in turns if turn.message in left_out]
            _, offsets = self._tokens(whole)
            return ids, said & ~tokens_in_spans(offsets, spans)
        turns = self._finder.turns(conversation, whole)
        ids, offsets = self._tokens(whole)
        spans = [(turn.begin, turn.end) for turn in turns if turn.message not in left_out]
        return ids, tokens_in_spans(offsets, spans)

    def prompt(self, conversation: Conversation) -> list[int]:
        """Token ids of all turns and of what the template puts before an answer.

        Raises:
            RefusedRecord: the template refuses the conversation.
        """
        ids, _ = self._tokens(self.template.render(self.template.in_its_form(conversation), generation_prompt=True))
        return ids.tolist()

    def _tokens(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        return ids_and_offsets_of(text, self.template.tokenizer, self._cutter)


def tokens_in_spans(offsets: np.ndarray, spans: list[tuple[int, int]]) -> np.ndarray:
    """[L] bool: whether each token has a character within a span, given its [begin, end) characters.

    Byte-level tokenizers may trim white space off a token's offsets; an empty range is taken to begin where the token
    before it ended.
    """
    begins, ends = np.asarray(offsets, np.int64).reshape(-1, 2).T
    previous_ends = np.concatenate([[0], np.maximum.accumulate(ends)[:-1]]) if len(ends) else ends
    begins = np.where(begins == ends, np.minimum(previous_ends, begins), begins)
    inside = np.zeros(len(ends), bool)
    for begin, end in spans:
        inside |= (begins < end) & (ends > begin)
    return inside
