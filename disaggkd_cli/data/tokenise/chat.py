"""Which tokens of a conversation count: those that the assistant says, up to and including the end of its turn.

Two ways, both through the tokenizer's chat template:
* The template marks what the assistant says with `{% generation %}`: transformers' own mask is taken.
* It does not: the conversation is rendered up to each assistant turn (with the generation prompt, so that the mask
  begins where generation would) and through it, and both must be true prefixes of the whole. Templates that render the
  last turn differently (Qwen3 gives it an empty thought) fail the second test; there the whole must go on, after the
  first prefix, with the message's own words and an end token. Otherwise nothing can be known, and the conversation is
  refused. White space after the turn's end token (`<|im_end|>\\n`) does not count: generation has stopped by then.

The whole is always tokenised at once, as at inference; characters are mapped to tokens by the tokenizer's offsets. A
token that reaches over the beginning of a turn counts, as it does in transformers' own mask.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from disaggkd_cli.data.read.documents import Conversation
from disaggkd_cli.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MEND = (
    "Give the tokenizer a chat template with {% generation %} markers around what the assistant says "
    "(data.chat_template: FILE)"
)


def has_generation_markers(chat_template: str) -> bool:
    """Whether the template says itself what the assistant generates."""
    return bool(_GENERATION_MARKER.search(chat_template))


def encode_conversation(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, chat_template: str
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [L] int32 and whether each token is one that the assistant says [L] bool.

    Raises:
        UserError: the template refuses the conversation, or does not let the assistant's part be told from the rest.
    """
    if has_generation_markers(chat_template):
        encoded = _ask_template(
            conversation,
            lambda: tokenizer.apply_chat_template(
                conversation.messages,
                tools=conversation.tools,
                chat_template=chat_template,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            ),
        )
        return np.asarray(encoded["input_ids"], np.int32), np.asarray(encoded["assistant_masks"], bool)

    def render(turns: int, generation_prompt: bool = False) -> str:
        return _ask_template(
            conversation,
            lambda: tokenizer.apply_chat_template(
                conversation.messages[:turns],
                tools=conversation.tools,
                chat_template=chat_template,
                tokenize=False,
                add_generation_prompt=generation_prompt,
            ),
        )

    whole = render(len(conversation.messages))
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    end_tokens = tuple(sorted(special.union(tokenizer.all_special_tokens)))
    spans = assistant_spans(conversation, whole, render, end_tokens)
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return np.asarray(encoded["input_ids"], np.int32), tokens_in_spans(encoded["offset_mapping"], spans)


def assistant_spans(
    conversation: Conversation, whole: str, render: Callable[..., str], end_tokens: tuple[str, ...]
) -> list[tuple[int, int]]:
    """[begin, end) characters of `whole` that the assistant says, turn by turn.

    Args:
        whole: the rendered conversation.
        render: (number of messages, generation prompt or not) → those first messages rendered.
        end_tokens: special tokens that may end a turn; white space after them is left out.
    """
    spans = []
    for turn, message in enumerate(conversation.messages):
        if message["role"] != "assistant":
            continue
        before, through = render(turn, True), render(turn + 1)
        if not whole.startswith(through):
            through = _through_own_words(message, whole, before, end_tokens)
        if not (through and whole.startswith(before) and through.startswith(before)):
            raise UserError(
                f"{conversation.where}: the chat template renders message {turn + 1} (assistant) differently when it "
                f"is the last one, so what the assistant says can't be told from the rest. {_MEND}, or end the "
                "conversation there."
            )
        begin, end = len(before), len(through)
        said = whole[begin:end].rstrip()
        if said.endswith(end_tokens):
            end = begin + len(said)
        spans.append((begin, end))
    return spans


def _through_own_words(message: dict, whole: str, before: str, end_tokens: tuple[str, ...]) -> str | None:
    """`whole` up to the end of `message`, if after `before` it literally goes on with its content and an end token."""
    content = message.get("content")
    if not content or message.get("tool_calls"):
        return None
    for words in (content, content.strip()):
        for end_token in end_tokens:
            if whole.startswith(words + end_token, len(before)):
                return whole[: len(before) + len(words + end_token)]
    return None


def tokens_in_spans(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> np.ndarray:
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


def _ask_template(conversation: Conversation, ask: Callable):
    import jinja2

    try:
        return ask()
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        # A template is a program of the model's author: any of these is its way to refuse messages.
        reason = str(error).strip() or type(error).__name__
        raise UserError(f"{conversation.where}: the chat template refuses this conversation ({reason})") from error
