"""Find what the assistant says inside the whole rendering of a conversation.

Prefixes of a conversation need not render as they do inside the whole: templates drop earlier thoughts, treat the last
turn in a way of its own, or open a thought in the generation prompt alone. So each turn is found in the whole: the
conversation is rendered again with the message's words (content, thought, arguments of tool calls) exchanged for
marks. What stands before the first mark and after the last is the same in both, or the turn can't be told apart; what
lies between is the message's words. In the end all turns are exchanged at once, and the pieces must add up to that
rendering.

A turn begins where generation would: after the generation prompt, as far as it stands before the words. It ends as a
conversation that ends with this message does, white space after its end token left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from os.path import commonprefix

from disaggkd_cli.data.read.documents import Conversation
from disaggkd_cli.data.refusals import RefusedRecord
from disaggkd_cli.data.tokenise.marks import (
    begins_with_tag,
    call_marks,
    exchange,
    has_words,
    map_text,
    marked_forms,
    marked_names,
    new_mark,
    with_names,
)
from disaggkd_cli.data.tokenise.template import ChatTemplate, Message

_SPEAKERS = ("system", "developer", "user", "assistant")
"""Whoever else speaks is a tool."""
_MEND = (
    "give the tokenizer a chat template with {% generation %} markers around what the assistant says "
    "(data.chat_template: FILE)"
)


@dataclass(frozen=True)
class Turn:
    """One assistant's message within the whole rendering."""

    message: int
    begin: int
    """First character that the assistant generates."""
    end: int
    """After the last one, its end token included."""


@dataclass(frozen=True)
class _Place:
    """Where the words of one message stand, and what stands there once they are marks."""

    begin: int
    end: int
    marked: str
    message: Message
    """The message with marks for words."""
    names: dict[str, str]
    """Mark → name, of functions whose names are marked: see `with_names`."""


class TurnFinder:
    """Finds assistant turns as one template renders them."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        tokenizer = template.tokenizer
        added = tokenizer.added_tokens_decoder.values()
        names = {token.content for token in added} | set(tokenizer.all_special_tokens)
        self._tokens = tuple(sorted((name for name in names if name.strip()), key=len, reverse=True))
        special = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
        self._end_tokens = tuple(sorted(special))
        self._longest = max(map(len, self._tokens), default=0)
        self._openings: set[str] = set()

    def turns(self, conversation: Conversation, whole: str) -> list[Turn]:
        """The assistant's turns in `whole`, the rendered conversation (in the template's form), in order.

        Raises:
            RefusedRecord: a turn can't be told from the rest, or is not rendered.
        """
        mark = new_mark(whole)
        places: dict[int, _Place] = {}
        turns: list[Turn] = []
        for number, message in enumerate(conversation.messages):
            if message["role"] == "assistant":
                place = places[number] = self._place(conversation, whole, number, f"{mark}{number}x")
                floor = turns[-1].end if turns else 0
                if place.begin < floor:
                    raise _indistinct(conversation, number)
                begin = self._begin(conversation, whole, number, place, floor)
                turns.append(Turn(number, begin, self._end(conversation, whole, number, place)))
        others = [number for number, message in enumerate(conversation.messages) if message["role"] not in _SPEAKERS]
        if len(places) > 1 or others:
            self._prove(conversation, whole, places, others, f"{mark}y")
        return turns

    def _place(self, conversation: Conversation, whole: str, number: int, mark: str) -> _Place:
        message = conversation.messages[number]
        reason = None
        for marked in marked_forms(message, mark):
            messages = [*conversation.messages]
            messages[number] = marked
            try:
                text = self.template.render(conversation, messages)
            except RefusedRecord as error:
                reason = error
                continue
            names = marked_names(message, mark)
            text = with_names(text, names)
            if missing := [call for call in call_marks(message, mark) if call not in text]:
                reason = RefusedRecord(
                    conversation.where,
                    f"the chat template does not render the tool calls of message {number + 1} "
                    f"({len(missing)} of {len(message['tool_calls'])})",
                )
                continue
            found = text.find(mark)
            if found < 0:
                reason = RefusedRecord(
                    conversation.where, f"the chat template does not render message {number + 1} (assistant)"
                )
                continue
            last = text.rfind(mark)
            after = re.compile(re.escape(mark) + r"\d*z").match(text, last).end()
            begin, end = found, len(whole) - (len(text) - after)
            if begin <= end and whole.startswith(text[:found]) and whole.endswith(text[after:]):
                return _Place(begin, end, text[found:after], marked, names)
            if not has_words(message.get("content")):
                # Templates may put something around words that they leave out where there are none.
                begin = len(commonprefix([whole, text[:found]]))
                same = len(commonprefix([whole[begin:][::-1], text[after:][::-1]]))
                end = len(whole) - same
                if not whole[begin:end].strip():
                    return _Place(begin, end, text[begin : len(text) - same], marked, names)
            reason = None
        raise reason or _indistinct(conversation, number)

    def _begin(self, conversation: Conversation, whole: str, number: int, place: _Place, floor: int) -> int:
        """Where generation would begin: after what of the generation prompt stands before the words."""
        before = whole[floor : place.begin]
        if any(before.endswith(opening) for opening in self._openings):
            return place.begin
        before_it = conversation.messages[:number]
        opening, prompt = self._opening(conversation, before_it) if before_it else ("", "")
        if prompt and floor <= len(prompt) <= place.begin and whole.startswith(prompt):
            # A header all the same, where the prompt has none (after a tool's result), is not the assistant's either.
            header = "" if opening else self._plain_opening(conversation)
            has_header = whole.startswith(header, len(prompt), place.begin)
            return len(prompt) + (len(header) if has_header else 0)
        if not prompt:
            opening = self._plain_opening(conversation)
        if not opening.strip():
            return self._after_tokens(prompt, whole, floor, place)
        first = min((at for token in self._tokens if (at := opening.find(token)) >= 0), default=None)
        if first is None:
            at = before.rfind(opening)
            anchor = opening
        else:
            anchor = next(token for token in self._tokens if opening.startswith(token, first))
            opening = opening[first:]
            at = before.rfind(anchor)
        if at < 0:
            return self._after_tokens(prompt, whole, floor, place)
        same = commonprefix([before[at:], opening])
        if same != opening and begins_with_tag(conversation.messages[number].get("content")):
            same = commonprefix([same, self._without_tags(conversation, number)[floor + at :]])
        begin = floor + at + len(same)
        if begin == place.begin:
            if before[at:] == opening:
                self._openings.add(opening)
        elif number and anchor in str(conversation.messages[number - 1]):
            self._refuse_others_words(conversation, whole, number, floor + at)
        return begin

    def _after_tokens(self, prompt: str, whole: str, floor: int, place: _Place) -> int:
        """Where a turn without a header begins: where the whole parts from the prompt, if that goes on with tokens of
        the template's alone; else at the words."""
        same = len(commonprefix([prompt, whole]))
        rest = prompt[same:]
        for token in self._tokens:
            rest = rest.replace(token, "")
        return same if prompt and not rest.strip() and floor <= same <= place.begin else place.begin

    def _without_tags(self, conversation: Conversation, number: int) -> str:
        """The rendering with a mark for all of a message's content: what stands before it is the template's."""
        messages = [*conversation.messages]
        content = map_text(messages[number]["content"], lambda _text: "Zq")
        messages[number] = {**messages[number], "content": content}
        return self.template.render(conversation, messages)

    def _refuse_others_words(self, conversation: Conversation, whole: str, number: int, begin: int) -> None:
        """Someone has written the beginning of a turn into the message before: prove that this is the template's."""
        mark = new_mark(whole)
        messages = [*conversation.messages]
        content = [{"type": "text", "text": mark}] if isinstance(messages[number - 1].get("content"), list) else mark
        messages[number - 1] = {**messages[number - 1], "content": content}
        text = self.template.render(conversation, messages)
        if mark in text:
            after = text[text.rfind(mark) + len(mark) :]
            if not whole.endswith(after) or len(whole) - len(after) > begin:
                raise _indistinct(conversation, number)

    def _opening(self, conversation: Conversation, messages: list[Message]) -> tuple[str, str]:
        """The generation prompt after some messages, and all of the rendering with it; empty where that is refused."""
        try:
            without = self.template.render(conversation, messages)
            asked = self.template.render(conversation, messages, generation_prompt=True)
        except RefusedRecord:
            return "", ""
        return asked[len(commonprefix([without, asked])) :], asked

    def _plain_opening(self, conversation: Conversation) -> str:
        """The generation prompt after a user's message."""
        for content in ("x", [{"type": "text", "text": "x"}]):
            opening, _ = self._opening(conversation, [{"role": "user", "content": content}])
            if opening:
                return opening
        return ""

    def _end(self, conversation: Conversation, whole: str, number: int, place: _Place) -> int:
        """After the words and what ends the turn."""
        rest = whole[place.end :]
        eos = self.template.tokenizer.eos_token
        if eos and rest.startswith(eos):
            return place.end + len(eos)
        if number == len(conversation.messages) - 1:
            closing = self._last_closing(conversation, whole, place)
        else:
            closing = self._closing(conversation, number, place, rest)
        said = whole[: place.end + closing].rstrip()
        if said.endswith(self._end_tokens) and len(said) > place.end:
            return len(said)
        if not said[place.end :] and not self._is_assistant(conversation, number + 1):
            # The turn has no end token of its own: generation stops at what opens the next one.
            opening = next((token for token in self._end_tokens if rest.startswith(token)), "")
            return place.end + (len(opening) or closing)
        return place.end + closing

    @staticmethod
    def _is_assistant(conversation: Conversation, number: int) -> bool:
        return number < len(conversation.messages) and conversation.messages[number]["role"] == "assistant"

    def _last_closing(self, conversation: Conversation, whole: str, place: _Place) -> int:
        """How many characters end the last turn: all that follow, but for what only ends the conversation."""
        rest = whole[place.end :]
        if len(rest.split()) > 1:
            messages = [*conversation.messages, {"role": "user", "content": "x"}]
            try:
                longer = self.template.render(conversation, messages)
            except RefusedRecord:
                return len(rest)
            same = commonprefix([rest, longer[place.end :]])
            if longer.startswith(whole[: place.end]) and same.rstrip().endswith(self._end_tokens):
                return len(same)
        return len(rest)

    def _closing(self, conversation: Conversation, number: int, place: _Place, rest: str) -> int:
        """How many characters of `rest` end the turn: as many as do where the conversation ends there."""
        try:
            messages = [*conversation.messages[:number], place.message]
            text = with_names(self.template.render(conversation, messages), place.names)
            at = max(text.rfind(mark) + len(mark) for mark in re.findall(r"Zq\w*?z", place.marked)[-1:])
            tail = text[at:]
        except (RefusedRecord, ValueError):
            ends = [at + len(token) for token in self._end_tokens if (at := rest.find(token)) >= 0]
            return min(ends, default=0)
        same = len(commonprefix([rest, tail]))
        if same == len(tail):
            return same
        for start in range(same, max(-1, same - self._longest), -1):
            token = next((token for token in self._tokens if rest.startswith(token, start)), None)
            other = next((token for token in self._tokens if tail.startswith(token, start)), None)
            if other and start + len(other) > same:
                # The last turn may have an end token of its own: the one that stands in its place counts.
                ended = rest[:start].rstrip().endswith(self._end_tokens)
                return start + len(token) if token in self._end_tokens and not ended else start
        return same

    def _prove(
        self, conversation: Conversation, whole: str, places: dict[int, _Place], others: list[int], mark: str
    ) -> None:
        """All turns exchanged at once give the whole with each exchanged, and none of them holds what a tool (`others`)
        has said, or they are not apart."""
        messages = [*conversation.messages]
        pieces, names, at = [], {}, 0
        for number, place in places.items():
            messages[number] = place.message
            pieces += [whole[at : place.begin], place.marked]
            names |= place.names
            at = place.end
        if with_names(self.template.render(conversation, messages), names) != "".join(pieces) + whole[at:]:
            raise _indistinct(conversation, next(iter(places)))
        if others:
            for number in others:
                content = messages[number].get("content") or ""
                changed = map_text(content, lambda text: exchange(text, mark))
                messages[number] = {**messages[number], "content": changed}
            text, at = with_names(self.template.render(conversation, messages), names), 0
            for number, place in places.items():
                at = text.find(place.marked, at)
                if at < 0:
                    raise _indistinct(conversation, number)
                at += len(place.marked)


def _indistinct(conversation: Conversation, number: int) -> RefusedRecord:
    return RefusedRecord(
        conversation.where,
        f"what the assistant says in message {number + 1} can't be told from the rest of the rendered conversation; "
        f"{_MEND}",
    )
