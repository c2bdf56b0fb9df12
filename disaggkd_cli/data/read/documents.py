"""One document of a dataset, before it is tokenised: running text, a prompt with its completion, or a conversation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


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
    completion: str | None
    """None: the student writes one."""


@dataclass(frozen=True)
class Conversation:
    """Only what the assistant says counts. `messages` and `tools` go to the chat template as they are."""

    where: str
    messages: list[dict]
    tools: list[dict] | None = None
    untrained: frozenset[int] = frozenset()
    """Indices of assistant's messages that do not count all the same."""
    template_arguments: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, for this conversation alone."""
    is_prompt: bool = False
    """Whether the whole of it is asked: the student answers."""

    def with_messages(self, messages: list[dict]) -> Conversation:
        """The same with the messages in another form."""
        return replace(self, messages=messages)


Document = Text | PromptCompletion | Conversation
