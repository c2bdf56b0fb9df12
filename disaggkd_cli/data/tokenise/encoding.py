"""Documents → token ids and which of them count.

* Text: every token counts as a target (the first of a document has no predecessor, so it never is one).
* Prompt and completion: the completion's tokens and the end token count. The two are tokenised apart, which is what a
  model meets at inference, so the boundary is exact. Tokenizers that put a mark before every text (SentencePiece's
  "▁") would put a second one between them; there the whole is tokenised at once and cut at the boundary, and only where
  no token ends on it are the two tokenised apart.
* Conversations: see `chat`.
* What the student is to complete: the prompt, and behind it one end token that stands in for the completion, so that
  the prompt is found where it is found in others. It is replaced before anything is trained on.

A start token is put where the tokenizer puts one. Text and completions are ended with the tokenizer's end token if it
has one; conversations end as their template says. A text that has such a token already gets no second.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from disaggkd_cli.data.read.cutting import TextCutter
from disaggkd_cli.data.read.documents import Conversation, Document, PromptCompletion, Text
from disaggkd_cli.data.refusals import RefusedRecord
from disaggkd_cli.data.tokenise.chat import ChatEncoder
from disaggkd_cli.data.tokenise.in_pieces import IDS_ONLY, ids_and_offsets_of, ids_of
from disaggkd_cli.data.tokenise.template import ChatTemplate
from disaggkd_cli.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBES = 20


@dataclass(frozen=True)
class EncodedDocument:
    """One document as tokens."""

    input_ids: np.ndarray
    """[L] int32."""
    supervised: np.ndarray
    """[L] bool: whether the token counts as a target (where it has a predecessor)."""
    is_text: bool
    """Running text may be cut anywhere; an answer must stay with its prompt."""
    continues: bool = False
    """Whether this is a piece of a long text that goes on in the next one."""


class DocumentEncoder:
    """Applies one tokenizer, and one chat template, to documents of every kind."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str | None = None,
        template_arguments: dict[str, Any] | None = None,
    ):
        """`chat_template`: Jinja text in place of the tokenizer's own. `template_arguments`: the template's variables.

        Raises:
            UserError: the tokenizer adds special tokens in a way that can't be told apart from text.
        """
        self.tokenizer = tokenizer
        self.chat_template = chat_template or tokenizer.chat_template
        self.template_arguments = template_arguments or {}
        self._chats: dict[str, ChatEncoder] = {}
        self.start_ids, self.end_ids = _added_ids(tokenizer)
        self.end_text = "".join(tokenizer.convert_ids_to_tokens(self.end_ids))
        self.marks_beginnings = _marks_beginnings(tokenizer)
        self.cutter = TextCutter(tokenizer, may_cut=not self.marks_beginnings)

    def encode(self, documents: Sequence[Document]) -> list[EncodedDocument | RefusedRecord]:
        """Encode documents of any mixture of kinds, keeping their order; why not, where one can't be used.

        Raises:
            UserError: conversations can't be encoded at all with this tokenizer.
        """
        encoded: list[EncodedDocument | RefusedRecord | None] = [None] * len(documents)
        texts = [index for index, document in enumerate(documents) if isinstance(document, Text)]
        if texts:
            ids_of_texts = self.tokenizer([documents[index].text for index in texts], **IDS_ONLY)["input_ids"]
            for index, ids in zip(texts, ids_of_texts, strict=True):
                encoded[index] = self._text(documents[index], ids)
        for index, document in enumerate(documents):
            if isinstance(document, PromptCompletion) and document.completion is None:
                prompt = ids_of(document.prompt, self.tokenizer, self.cutter).tolist()
                encoded[index] = self._asked(document, [*self._start(prompt), *prompt])
            elif isinstance(document, PromptCompletion):
                prompt, completion = self._prompt_and_completion(document)
                encoded[index] = self._whole(prompt, completion, self._is_ended(document.completion), is_text=False)
            elif isinstance(document, Conversation):
                encoded[index] = self._conversation(document)
        return encoded

    def _text(self, text: Text, ids: list[int]) -> EncodedDocument:
        if text.begins and text.ends:
            return self._whole([], ids, self._is_ended(text.text), is_text=True)
        start = self._start(ids) if text.begins else []
        end = self.end_ids if text.ends and not self._is_ended(text.text) else []
        tokens = np.asarray([*start, *ids, *end], np.int32)
        return EncodedDocument(tokens, np.arange(len(tokens)) >= len(start), True, continues=not text.ends)

    def _whole(self, prompt: list[int], target: list[int], is_ended: bool, is_text: bool) -> EncodedDocument:
        start = self._start([*prompt, *target[: len(self.start_ids)]])
        ids = np.asarray([*start, *prompt, *target, *([] if is_ended else self.end_ids)], np.int32)
        supervised = np.zeros(len(ids), bool)
        # A text without a token has nothing to learn, not even its end; an empty completion was somebody's answer.
        supervised[len(start) + len(prompt) :] = bool(target) or not is_text
        return EncodedDocument(ids, supervised, is_text)

    def _start(self, ids: list[int]) -> list[int]:
        """The ids to put before others: none where those begin with them."""
        return [] if ids[: len(self.start_ids)] == self.start_ids else self.start_ids

    def _is_ended(self, text: str) -> bool:
        """Whether a text, white space aside, ends with the end token."""
        return bool(self.end_text) and text.rstrip().endswith(self.end_text)

    def _conversation(self, document: Conversation) -> EncodedDocument | RefusedRecord:
        template = self._template(document)
        if template not in self._chats:
            self._chats[template] = ChatEncoder(ChatTemplate(self.tokenizer, template, self.template_arguments))
        try:
            if document.is_prompt:
                return self._asked(document, self._chats[template].prompt(document))
            ids, said = self._chats[template].encode(document)
        except RefusedRecord as refused:
            return refused
        return EncodedDocument(ids, said, is_text=False)

    def _asked(self, document: Document, prompt: list[int]) -> EncodedDocument | RefusedRecord:
        if not prompt:
            return RefusedRecord(document.where, "the prompt is empty, and there is nothing to go on from")
        ids = np.asarray([*prompt, *(self.end_ids[:1] or prompt[-1:])], np.int32)
        return EncodedDocument(ids, np.arange(len(ids)) == len(prompt), is_text=False)

    def _prompt_and_completion(self, document: PromptCompletion) -> tuple[list[int], list[int]]:
        if self.marks_beginnings and document.prompt:
            ids, offsets = ids_and_offsets_of(document.prompt + document.completion, self.tokenizer, self.cutter)
            ends = offsets[:, 1]
            cut = int((ends <= len(document.prompt)).sum())
            if cut and ends[cut - 1] == len(document.prompt):
                return ids[:cut].tolist(), ids[cut:].tolist()
        prompt, completion = (
            ids_of(text, self.tokenizer, self.cutter) for text in (document.prompt, document.completion)
        )
        return prompt.tolist(), completion.tolist()

    def _template(self, conversation: Conversation) -> str:
        template = self.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use" if conversation.tools else "default", template.get("default"))
        if not template:
            raise UserError(
                f"{conversation.where}: holds messages, but the tokenizer has no chat template; "
                "name a Jinja file with data.chat_template, or give prompt and completion"
            )
        if not self.tokenizer.is_fast:
            raise UserError(
                f"{conversation.where}: masking conversations needs a tokenizer with tokenizer.json (character offsets)"
            )
        return template


def _added_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Ids that the tokenizer itself puts before a text, and those that end a document: its end token, if it has one."""
    special = set(tokenizer.all_special_ids)
    ordinary = (token for token, index in tokenizer.get_vocab().items() if index not in special)
    for probe in ("a", *islice(ordinary, _PROBES)):  # a small vocabulary may have no "a"
        bare = list(tokenizer(probe, add_special_tokens=False)["input_ids"])
        full = list(tokenizer(probe)["input_ids"])
        starts = [at for at in range(len(full) - len(bare) + 1) if full[at : at + len(bare)] == bare]
        if bare and len(starts) == 1:
            before, after = full[: starts[0]], full[starts[0] + len(bare) :]
            if not after and tokenizer.eos_token_id is not None:
                after = [tokenizer.eos_token_id]
            return before, after
    raise UserError("the tokenizer mixes special tokens and text in a way that can't be told apart; use its plain form")


def _marks_beginnings(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a text's first token carries a mark (a space) that the text itself does not have."""
    if not tokenizer.is_fast:
        return False
    state = json.loads(tokenizer.backend_tokenizer.to_str())

    def parts(stage: dict | None) -> list[dict]:
        inside = (stage or {}).get("normalizers") or (stage or {}).get("pretokenizers") or []
        return [stage or {}, *(part for item in inside for part in parts(item))]

    return any(
        part.get("type") == "Prepend"
        or (part.get("type") == "Metaspace" and part.get("prepend_scheme", "always") != "never")
        or (part.get("type") == "ByteLevel" and part.get("add_prefix_space", False))
        for stage in ("normalizer", "pre_tokenizer")
        for part in parts(state[stage])
    )
