"""The messages of a conversation, checked and brought to the names that chat templates know."""

from __future__ import annotations

import json
from typing import Any

from disaggkd_cli.errors import UserError

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "function_call",
}


def from_json_text(value: Any) -> Any:
    """What a text that holds a JSON list or object holds, as tables have them; anything else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def messages_of(messages: object, where: str) -> list[dict]:
    """Checked messages.

    Raises:
        UserError: no list of objects with a role, and content (a string, or parts of type text) or tool_calls.
    """
    if isinstance(messages, str):
        raise UserError(f"{where}: messages must be a list of objects with role and content, not a string")
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: messages must be a list with at least one message")
    return [_message(message, number, where) for number, message in enumerate(messages, 1)]


def _message(message: object, number: int, where: str) -> dict:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UserError(f"{where}: message {number} must be an object with a role (a string)")
    calls = message.get("tool_calls")
    if isinstance(calls, str):
        message = {**message, "tool_calls": (calls := from_json_text(calls))}
    if calls is not None and not (
        isinstance(calls, list) and all(isinstance(call, dict) and _is_call(call) for call in calls)
    ):
        raise UserError(f"{where}: tool_calls of message {number} must be a list of objects with a function's name")
    content = message.get("content")
    if content is None and not calls:
        raise UserError(f"{where}: message {number} ({message['role']}) has neither content nor tool_calls")
    if isinstance(content, list):
        _require_text_parts(content, number, where)
    elif content is not None and not isinstance(content, str):
        raise UserError(
            f"{where}: content of message {number} must be a string or a list of parts, not {type(content).__name__}"
        )
    return message


def _is_call(call: dict) -> bool:
    function = call.get("function", call)
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _require_text_parts(parts: list, number: int, where: str) -> None:
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise UserError(f"{where}: each part of the content of message {number} must be an object with a type")
        if part["type"] != "text" or not isinstance(part.get("text"), str):
            raise UserError(
                f"{where}: the content of message {number} has a part of type {part['type']}; only text can be read"
            )


def untrained_of(messages: list[dict], where: str) -> frozenset[int]:
    """Which of the assistant's messages are not to be learned, by `weight: 0`, `train: false` or `loss_mask: 0`.

    Raises:
        UserError: another value, or a message of somebody else that is to be learned by `train: true`.
    """
    untrained = set()
    for index, message in enumerate(messages):
        for name in ("weight", "train", "loss_mask"):
            value = message.get(name)
            if value is None:
                continue
            if value not in (0, 1):
                raise UserError(f"{where}: {name} of message {index + 1} is {value!r}; it must be 0 or 1")
            if name == "train" and value and message["role"] != "assistant":
                raise UserError(
                    f"{where}: message {index + 1} ({message['role']}) has train: true; only the assistant's can"
                )
            if not value and message["role"] == "assistant":
                untrained.add(index)
    return frozenset(untrained)


def sharegpt_messages(turns: object, where: str) -> list[dict]:
    """Messages from ShareGPT's `from` and `value`; turns that have `role` and `content` already stay.

    Raises:
        UserError: no list of such turns, or a speaker that is not known.
    """
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{where}: conversations must be a list with at least one turn")
    messages = []
    for number, turn in enumerate(turns, 1):
        if isinstance(turn, dict) and "role" in turn:
            messages.append(turn)
            continue
        if not isinstance(turn, dict) or not isinstance(turn.get("from"), str):
            raise UserError(f"{where}: turn {number} must be an object with from and value")
        role = _SHAREGPT_ROLES.get(turn["from"].lower())
        if role is None:
            raise UserError(
                f"{where}: turn {number} is from {turn['from']!r}, which is nobody known; there are "
                f"{', '.join(_SHAREGPT_ROLES)}"
            )
        rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
        if role == "function_call":
            messages.append(
                {"role": "assistant", "content": "", "tool_calls": _calls(turn.get("value"), number, where)}
            )
        else:
            messages.append({**rest, "role": role, "content": turn.get("value")})
    return messages_of(messages, where)


def _calls(value: object, number: int, where: str) -> list[dict]:
    calls = from_json_text(value)
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and _is_call(call) for call in calls):
        raise UserError(f"{where}: turn {number} (function_call) must be JSON with a name and arguments")
    return [call if "function" in call else {"type": "function", "function": call} for call in calls]


def tools_of(tools: object, where: str) -> list[dict] | None:
    """The tools of a conversation, which tables often hold as JSON text.

    Raises:
        UserError: no list of objects.
    """
    if isinstance(tools, str) and not tools.strip():
        return None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: tools is a string that is not JSON ({error})") from error
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"{where}: tools must be a list of objects")
    return tools
