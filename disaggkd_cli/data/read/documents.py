"""One document of a dataset, before it is tokenised: running text, a prompt with its completion, or a conversation."""

from __future__ import annotations

import json
from dataclasses import dataclass

from disaggkd_cli.errors import UserError

RECORD_KINDS = ("auto", "text", "prompt_completion", "messages")
RECORD_FIELDS = ("text", "prompt", "completion", "messages", "tools")


@dataclass(frozen=True)
class Text:
    """Running text, or a piece of one: every next token counts."""

    where: str
    text: str
    begins: bool = True
    """Whether the text begins here, or goes on from the piece before."""
    ends: bool = True
    """Whether the text ends here, or goes on in the next piece."""


@dataclass(frozen=True)
class PromptCompletion:
    """Only the completion's tokens and the end token count."""

    where: str
    prompt: str
    completion: str


@dataclass(frozen=True)
class Conversation:
    """Only what the assistant says counts. `messages` and `tools` go to the chat template as they are."""

    where: str
    messages: list[dict]
    tools: list[dict] | None = None


Document = Text | PromptCompletion | Conversation


def document_from_record(record: object, where: str, kind: str = "auto") -> Document:
    """The document that a JSON object or a table row holds.

    Args:
        record: a dict with `text`, or `prompt` and `completion`, or `messages` (and maybe `tools`); others are let be.
        where: file and line, for messages.
        kind: one of RECORD_KINDS; "auto" refuses a record that could be read in two ways.

    Raises:
        UserError: missing, ambiguous or wrongly typed fields.
    """
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected a JSON object, found {type(record).__name__}")
    present = {key for key in RECORD_FIELDS if record.get(key) is not None}
    fields = {"text": {"text"}, "prompt_completion": {"prompt", "completion"}, "messages": {"messages"}}
    if kind == "auto":
        possible = [name for name, needed in fields.items() if needed <= present]
        if len(possible) > 1:
            raise UserError(
                f"{where}: could be read as {' or as '.join(possible)}; say which with data.records={possible[-1]}"
            )
        if not possible:
            raise UserError(
                f"{where}: needs text, or prompt and completion, or messages; found {_keys(record, present)}"
            )
        kind = possible[0]
    elif missing := sorted(fields[kind] - present):
        raise UserError(f"{where}: needs {' and '.join(missing)} (data.records={kind}); found {_keys(record, present)}")
    if kind == "messages":
        return Conversation(where, _messages(record["messages"], where), _tools(record.get("tools"), where))
    for key in sorted(fields[kind]):
        if not isinstance(record[key], str):
            raise UserError(f"{where}: {key} must be a string, not {type(record[key]).__name__}")
    if kind == "text":
        return Text(where, record["text"])
    return PromptCompletion(where, record["prompt"], record["completion"])


def _keys(record: dict, present: set[str]) -> str:
    empty = sorted(key for key in RECORD_FIELDS if key in record and key not in present)
    keys = ", ".join(map(str, list(record)[:12])) or "no key at all"
    return keys + (f" (null: {', '.join(empty)})" if empty else "")


def _messages(messages: object, where: str) -> list[dict]:
    if isinstance(messages, str):
        raise UserError(f"{where}: messages must be a list of objects with role and content, not a string")
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: messages must be a list with at least one message")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f"{where}: message {number} must be an object with a role (a string)")
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            raise UserError(f"{where}: message {number} ({message['role']}) has neither content nor tool_calls")
        if content is not None and not isinstance(content, str):
            raise UserError(f"{where}: content of message {number} must be a string, not {type(content).__name__}")
    return messages


def _tools(tools: object, where: str) -> list[dict] | None:
    if isinstance(tools, str):  # tables often hold them as JSON text
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: tools is a string that is not JSON ({error})") from error
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"{where}: tools must be a list of objects")
    return tools
