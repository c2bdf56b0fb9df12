"""Exchange the words of a message for marks: texts that stand nowhere in its conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from disaggkd_cli.data.tokenise.template import Message, arguments_of, with_arguments

_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_TAG = re.compile(r"(<[^<>\s]*>|\[/?[A-Z_]+\])")
_JSON_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"(?P<colon>\s*:)?')
"""A text in JSON; before a colon it is a key."""


def new_mark(whole: str) -> str:
    """Letters that stand nowhere in the text."""
    mark = "Zq"
    while mark in whole:
        mark += "j"
    return mark + "m"


def call_marks(message: Message, mark: str) -> list[str]:
    """A mark of its own for each tool call of a message."""
    return [f"{mark}{1000 + number}z" for number in range(len(message.get("tool_calls") or []))]


def marked_forms(message: Message, mark: str) -> Iterator[Message]:
    """Ways to exchange a message's words for marks: first word by word between tags, so that templates that look for
    tags in a text take the same way; then the whole content."""
    end = f"{mark}0z"
    thoughts = {key: end for key in _THOUGHTS if isinstance(message.get(key), str) and message[key].strip()}
    calls = {}
    if message.get("tool_calls"):
        pairs = zip(message["tool_calls"], call_marks(message, mark), strict=True)
        calls = {"tool_calls": [_marked_call(call, call_mark) for call, call_mark in pairs]}
    content = message.get("content")
    if has_words(content):
        yield {**message, **thoughts, **calls, "content": map_text(content, lambda text: exchange(text, end))}
        yield {**message, **thoughts, **calls, "content": map_text(content, lambda _text: end)}
    elif calls:
        yield {**message, **thoughts, **calls}
    else:
        filled = [{"type": "text", "text": end}] if isinstance(content, list) else end
        yield {**message, **thoughts, "content": filled}


def has_words(content: Any) -> bool:
    """Whether a content, a string or parts, holds more than white space."""
    texts = [part["text"] for part in content] if isinstance(content, list) else [content]
    return any(text and text.strip() for text in texts)


def begins_with_tag(content: Any) -> bool:
    """Whether the first thing in a content is a tag, `<…>` or `[…]`."""
    text = content[0]["text"] if isinstance(content, list) and content else content
    return isinstance(text, str) and bool(_TAG.match(text.lstrip()))


def map_text(content: Any, change: Callable[[str], str]) -> Any:
    """A content with its text, or the text of each part, changed."""
    if isinstance(content, list):
        return [{**part, "text": change(part["text"])} for part in content]
    return change(content)


def exchange(text: str, mark: str) -> str:
    """The text with each stretch between tags exchanged, white space at its borders kept."""
    pieces = _TAG.split(text)
    for index in range(0, len(pieces), 2):
        if words := pieces[index].strip():
            pieces[index] = pieces[index].replace(words, mark)
    changed = "".join(pieces)
    return changed if mark in changed else mark


def _marked_call(call: Message, mark: str) -> Message:
    arguments = arguments_of(call)
    if not _has_values(arguments):
        function = {**(call.get("function") or call), "name": mark}
        return {**call, "function": function} if "function" in call else function
    if isinstance(arguments, str):
        if not _is_json(arguments):
            return with_arguments(call, mark)
        marked = _JSON_TEXT.sub(lambda text: text[0] if text["colon"] else f'"{mark}"', arguments)
        return with_arguments(call, marked)
    return with_arguments(call, _marked_values(arguments, mark))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _has_values(arguments: Any) -> bool:
    if isinstance(arguments, str):
        if not _is_json(arguments):
            return bool(arguments.strip())
        return any(not text["colon"] for text in _JSON_TEXT.finditer(arguments))
    return _has_text(arguments)


def _has_text(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_text, value.values()))
    return any(map(_has_text, value)) if isinstance(value, list) else isinstance(value, str)


def _marked_values(value: Any, mark: str) -> Any:
    """Arguments with every text in them exchanged."""
    if isinstance(value, dict):
        return {key: _marked_values(each, mark) for key, each in value.items()}
    if isinstance(value, list):
        return [_marked_values(each, mark) for each in value]
    return mark if isinstance(value, str) else value


def marked_names(message: Message, mark: str) -> dict[str, str]:
    """Mark → name of each function that has no argument to be marked."""
    calls = zip(message.get("tool_calls") or [], call_marks(message, mark), strict=True)
    return {
        call_mark: (call.get("function") or call)["name"]
        for call, call_mark in calls
        if not _has_values(arguments_of(call))
    }


def with_names(text: str, names: dict[str, str]) -> str:
    """The rendering with marked names once each: templates may repeat a function's name where its result is told."""
    for mark, name in names.items():
        before, found, after = text.partition(mark)
        text = before + found + after.replace(mark, name)
    return text
