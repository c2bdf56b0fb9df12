"""One chat template: how conversations are rendered, in the form that the template takes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

from disaggkd_cli.data.read.documents import Conversation
from disaggkd_cli.data.refusals import RefusedRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_PROBE = "Zprobe"

Message = dict[str, Any]


def has_generation_markers(chat_template: str) -> bool:
    """Whether the template says itself what the assistant generates; a mention in a comment is no marker."""
    return bool(_GENERATION_MARKER.search(_COMMENT.sub("", chat_template)))


class ChatTemplate:
    """Renders messages by one template.

    Messages come in forms: content as a string or in parts, arguments of a tool call as an object or as JSON text.
    They are rendered as they are where the template takes that, and in its own form otherwise.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str, arguments: dict[str, Any] | None = None) -> None:
        """`text`: Jinja. `arguments`: variables of the template's own, such as `enable_thinking`."""
        self.tokenizer = tokenizer
        self.text = text
        self.arguments = arguments or {}

    def render(
        self, conversation: Conversation, messages: list[Message] | None = None, *, generation_prompt: bool = False
    ) -> str:
        """The text of a conversation, or of other messages in its place (with its tools and arguments).

        Raises:
            RefusedRecord: the template refuses them.
        """
        return self.apply(
            conversation,
            conversation.messages if messages is None else messages,
            tokenize=False,
            add_generation_prompt=generation_prompt,
        )

    def apply(self, conversation: Conversation, messages: list[Message], **options: Any) -> Any:
        """What `apply_chat_template` makes of messages.

        Raises:
            RefusedRecord: the template refuses them.
        """
        import jinja2

        arguments = {**self.arguments, **conversation.template_arguments}
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=conversation.tools, chat_template=self.text, **options, **arguments
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            # A template is a program of the model's author: any of these is its way to refuse messages.
            reason = str(error).strip() or type(error).__name__
            raise RefusedRecord(
                conversation.where, f"the chat template refuses this conversation ({reason})"
            ) from error

    def in_its_form(self, conversation: Conversation) -> Conversation:
        """The conversation with contents and arguments in the form that the template takes."""
        messages = conversation.messages
        if any(isinstance(message.get("content"), list) for message in messages):
            if not self._takes_parts:
                messages = [_joined(message) for message in messages]
        elif not self._takes_strings and self._takes_parts:
            messages = [_in_parts(message) for message in messages]
        return self._with_calls(conversation.with_messages(messages))

    def _with_calls(self, conversation: Conversation) -> Conversation:
        """The first form of the tool calls that the template takes; the given one where it takes none."""
        if not any(message.get("tool_calls") for message in conversation.messages):
            return conversation
        for form in _call_forms(conversation):
            try:
                rendered = self.render(form)
            except RefusedRecord:
                continue
            if not any(json.dumps(text)[1:-1] in rendered and text not in rendered for text in _texts_of_calls(form)):
                return form  # otherwise JSON text was taken for a plain string, and quoted once more
        return conversation

    @cached_property
    def _takes_strings(self) -> bool:
        return self._shows(_PROBE)

    @cached_property
    def _takes_parts(self) -> bool:
        return self._shows([{"type": "text", "text": _PROBE}])

    def _shows(self, content: Any) -> bool:
        """Whether the template renders such content of a user's and an assistant's, and nothing of its wrapping."""
        messages = [{"role": role, "content": content} for role in ("user", "assistant")]
        try:
            text = self.render(Conversation("", messages))
        except RefusedRecord:
            return False
        return text.count(_PROBE) == 2 and "'type'" not in text and '"type"' not in text


def arguments_of(call: Message) -> Any:
    """The arguments of a tool call, whether in `function` or bare."""
    return (call.get("function") or call).get("arguments")


def with_arguments(call: Message, arguments: Any) -> Message:
    """The same call with other arguments."""
    if isinstance(call.get("function"), dict):
        return {**call, "function": {**call["function"], "arguments": arguments}}
    return {**call, "arguments": arguments}


def _texts_of_calls(conversation: Conversation) -> list[str]:
    calls = [call for message in conversation.messages for call in message.get("tool_calls") or []]
    return [arguments for arguments in map(arguments_of, calls) if isinstance(arguments, str) and '"' in arguments]


def _call_forms(conversation: Conversation) -> Iterator[Conversation]:
    """As given, with arguments as objects, as JSON text; the same with empty contents for lacking ones."""
    filled = [
        {**message, "content": ""} if message.get("content") is None else message for message in conversation.messages
    ]
    for form in (conversation, conversation.with_messages(filled)):
        yield form
        for change in (_as_object, _as_text):
            try:
                yield _each_call(form, change)
            except ValueError:
                continue


def _each_call(conversation: Conversation, change: Callable[[Any], Any]) -> Conversation:
    """The conversation with the arguments of every tool call changed."""
    messages = []
    for message in conversation.messages:
        if message.get("tool_calls"):
            calls = [
                call if (arguments := arguments_of(call)) is None else with_arguments(call, change(arguments))
                for call in message["tool_calls"]
            ]
            message = {**message, "tool_calls": calls}
        messages.append(message)
    return conversation.with_messages(messages)


def _as_object(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _joined(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "".join(part["text"] for part in content)}


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}
