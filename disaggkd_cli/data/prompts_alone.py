"""Prompts that stand alone, which the student completes: counted where they are trained on, refused where held out."""

from __future__ import annotations

from disaggkd_cli.data.notes import Notes
from disaggkd_cli.data.read.documents import Conversation, Document, PromptCompletion
from disaggkd_cli.errors import UserError


def is_prompt_alone(document: Document) -> bool:
    """Whether a document is a prompt and nothing else."""
    if isinstance(document, PromptCompletion):
        return document.completion is None
    return isinstance(document, Conversation) and document.is_prompt


def prompts_remark(key: str) -> str:
    """What is noted of each of a source's, see `Notes`."""
    return f"{key}: {{count}} records are prompts alone, which the student completes (first: {{first}})"


def refuse_to_hold_out(notes: Notes, key: str) -> None:
    """End where a fraction would be held out of a source with prompts alone: nothing could be measured on them.

    Raises:
        UserError: the source has such.
    """
    count, first = notes.found(prompts_remark(key))
    if count:
        raise UserError(
            f"data.eval: is a fraction of {key}, in which {count} records are prompts without an answer (the first: "
            f"{first}), and held-out loss needs answers; name held-out texts that have some with data.eval"
        )
