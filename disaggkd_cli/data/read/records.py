"""From a JSON object or a table row to a document: which fields a record may have, under which names.

| kind              | fields                                                                                        |
|-------------------|-----------------------------------------------------------------------------------------------|
| text              | `text`                                                                                        |
| prompt_completion | `prompt`, `completion`: both texts, or both lists of messages                                 |
| messages          | `messages` (`role`, `content`, …), maybe `tools`                                              |
| sharegpt          | `conversations` (`from`, `value`; or `role`, `content`), maybe `system` and `tools`           |
| alpaca            | `instruction`, `output`, maybe `input`, `system` and `history`                                |

Where the student completes every prompt, a prompt may stand alone, and a conversation may end with what is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from disaggkd_cli.config.source_names import RECORD_FIELDS
from disaggkd_cli.data.read.documents import Conversation, Document, PromptCompletion, Text
from disaggkd_cli.data.read.messages import from_json_text, messages_of, sharegpt_messages, tools_of, untrained_of
from disaggkd_cli.errors import UserError


@dataclass(frozen=True)
class RecordKind:
    """One form of records."""

    needed: frozenset[str]
    optional: frozenset[str]
    read: Callable[[dict, str], Document]
    said: str
    """What the log calls it; empty for the forms that need no naming."""


def _text(record: dict, where: str) -> Document:
    _require_strings(record, ("text",), where)
    return Text(where, record["text"])


def _prompt_completion(record: dict, where: str) -> Document:
    prompt, completion = (_maybe_messages(record.get(name)) for name in ("prompt", "completion"))
    if completion is None:
        return _prompt_alone(prompt, record, where)
    if isinstance(prompt, list) != isinstance(completion, list):
        raise UserError(f"{where}: prompt and completion must both be texts, or both be lists of messages")
    if isinstance(prompt, list):
        before, after = messages_of(prompt, f"{where}: prompt"), messages_of(completion, f"{where}: completion")
        messages = [*before, *after]
        untrained = untrained_of(messages, where) | {
            index for index, message in enumerate(before) if message["role"] == "assistant"
        }
        return _conversation(messages, untrained, record, where)
    _require_strings(record, ("completion", "prompt"), where)
    return PromptCompletion(where, record["prompt"], record["completion"])


def _prompt_alone(prompt: Any, record: dict, where: str) -> Document:
    if not isinstance(prompt, list):
        _require_strings(record, ("prompt",), where)
        return PromptCompletion(where, prompt, None)
    messages = messages_of(prompt, f"{where}: prompt")
    if messages[-1]["role"] not in _ASKING:
        raise UserError(
            f"{where}: prompt has no completion and ends with a message of {messages[-1]['role']}, so nothing is "
            f"asked; it must end with one of {' or '.join(_ASKING)}"
        )
    return _conversation(messages, frozenset(), record, where)


def _maybe_messages(value: Any) -> Any:
    """Messages out of JSON text; a text that is anything else stays a text."""
    found = from_json_text(value)
    is_messages = isinstance(found, list) and found and all(isinstance(each, dict) and "role" in each for each in found)
    return found if is_messages else value


def _messages(record: dict, where: str) -> Document:
    messages = messages_of(from_json_text(record["messages"]), where)
    return _conversation(messages, untrained_of(messages, where), record, where)


def _sharegpt(record: dict, where: str) -> Document:
    messages = sharegpt_messages(from_json_text(record["conversations"]), where)
    if record.get("system"):
        _require_strings(record, ("system",), where)
        messages = [{"role": "system", "content": record["system"]}, *messages]
    return _conversation(messages, untrained_of(messages, where), record, where)


def _alpaca(record: dict, where: str) -> Document:
    _require_strings(record, ("instruction", "output"), where)
    _require_strings({name: record.get(name) or "" for name in ("input", "system")}, ("input", "system"), where)
    messages = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    for pair in record.get("history") or []:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise UserError(f"{where}: history must be a list of pairs of texts")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    question = "\n".join(text for text in (record["instruction"], record.get("input")) if text)
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": record["output"]}]
    return Conversation(where, messages)


def _conversation(messages: list[dict], untrained: frozenset[int], record: dict, where: str) -> Conversation:
    arguments = from_json_text(record.get("chat_template_kwargs")) or {}
    if not isinstance(arguments, dict):
        raise UserError(f"{where}: chat_template_kwargs must be an object, not {type(arguments).__name__}")
    plain = [{key: value for key, value in message.items() if key not in _WEIGHTS} for message in messages]
    return Conversation(where, plain, tools_of(record.get("tools"), where), untrained, arguments)


_ASKING = ("user", "tool")
"""Roles whose message an assistant answers."""
_ALONE = "a prompt without an answer is only trained on with on_policy.fraction=1, and never held out"
_WEIGHTS = ("weight", "train", "loss_mask")
_OF_CHATS = frozenset({"tools", "chat_template_kwargs"})
KINDS = {
    "text": RecordKind(frozenset({"text"}), frozenset(), _text, ""),
    "prompt_completion": RecordKind(frozenset({"prompt", "completion"}), _OF_CHATS, _prompt_completion, ""),
    "messages": RecordKind(frozenset({"messages"}), _OF_CHATS, _messages, ""),
    "sharegpt": RecordKind(
        frozenset({"conversations"}),
        _OF_CHATS | {"system"},
        _sharegpt,
        "records are read as ShareGPT conversations (conversations: human → user, gpt → assistant)",
    ),
    "alpaca": RecordKind(
        frozenset({"instruction", "output"}),
        frozenset({"input", "system", "history"}),
        _alpaca,
        "records are read in Alpaca's form (instruction, and input on a line below, are the user's turn; output is the "
        "assistant's)",
    ),
}
RECORD_KINDS = ("auto", *KINDS)


@dataclass(frozen=True)
class RecordForm:
    """How the records of a source are read."""

    kind: str = "auto"
    """One of RECORD_KINDS; auto refuses a record that could be read in two ways."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Field → the name that the data have for it."""
    prompts: bool = False
    """Whether the student completes every prompt, so that one may stand alone."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Names that are read of a record, as the data have them."""
        return tuple(dict.fromkeys((*self.columns.values(), *RECORD_FIELDS)))

    def document(self, record: object, where: str) -> tuple[Document, str]:
        """The document that a JSON object or a table row holds, and what kind of record it is.

        Args:
            record: a dict with the fields of one kind; other fields are let be.
            where: file and line, for messages.

        Raises:
            UserError: missing, ambiguous or wrongly typed fields.
        """
        if not isinstance(record, dict):
            raise UserError(f"{where}: expected a JSON object, found {type(record).__name__}")
        if self.columns:
            record = self._renamed(record, where)
        present = {key for key in RECORD_FIELDS if record.get(key) is not None}
        kind = self.kind
        if kind == "auto":
            possible = [name for name in KINDS if not self._missing(name, present)]
            if len(possible) > 1:
                raise UserError(
                    f"{where}: could be read as {' or as '.join(possible)}; say which with data.records={possible[-1]}"
                )
            if not possible:
                alone = f". {_ALONE[0].upper()}{_ALONE[1:]}" if "prompt" in present else ""
                raise UserError(
                    f"{where}: needs text, or prompt and completion, or messages, or conversations, or instruction and "
                    f"output; found {_keys(record, present)}. Other names: data.columns, for instance "
                    "data.columns={prompt: question, completion: answer}" + alone
                )
            (kind,) = possible
        elif missing := self._missing(kind, present):
            alone = f"; {_ALONE}" if missing == ["completion"] else ""
            raise UserError(
                f"{where}: needs {' and '.join(missing)} (data.records={kind}); found {_keys(record, present)}{alone}"
            )
        document = KINDS[kind].read(record, where)
        if self.prompts and isinstance(document, Conversation) and document.messages[-1]["role"] in _ASKING:
            document = replace(document, is_prompt=True)
        return document, kind

    def _missing(self, kind: str, present: set[str]) -> list[str]:
        needed = KINDS[kind].needed
        return sorted(needed - present - ({"completion"} if self.prompts else set()))

    def _renamed(self, record: dict, where: str) -> dict:
        missing = [column for column in self.columns.values() if column not in record]
        if missing:
            raise UserError(
                f"{where}: has no {', '.join(missing)}, which data.columns names; found {_keys(record, set())}"
            )
        others = {
            key: value for key, value in record.items() if key not in self.columns and key not in self.columns.values()
        }
        return others | {name: record[column] for name, column in self.columns.items()}


def _require_strings(record: dict, names: tuple[str, ...], where: str) -> None:
    for name in names:
        if not isinstance(record[name], str):
            raise UserError(f"{where}: {name} must be a string, not {type(record[name]).__name__}")


def _keys(record: dict, present: set[str]) -> str:
    empty = sorted(key for key in RECORD_FIELDS if key in record and key not in present and record[key] is None)
    keys = ", ".join(map(str, list(record)[:12])) or "no key at all"
    return keys + (f" (null: {', '.join(empty)})" if empty else "")
