"""What an on-policy run has beside others: texts with room for completions, a writer, and what checkpoints carry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from disaggkd_cli.config import Config
from disaggkd_cli.config.on_policy import student_writes
from disaggkd_cli.data import TokenizedDataset
from disaggkd_cli.errors import UserError
from disaggkd_cli.on_policy.completions import from_text
from disaggkd_cli.on_policy.gathered import GatheredStudent
from disaggkd_cli.on_policy.generate import end_ids
from disaggkd_cli.on_policy.prompts import Room, with_room
from disaggkd_cli.on_policy.sampling import Sampler
from disaggkd_cli.on_policy.texts import OnPolicyTexts
from disaggkd_cli.on_policy.writer import FILE, StudentWriter
from disaggkd_cli.training.checkpoint import Checkpoint


def on_policy_dataset(config: Config, dataset: TokenizedDataset, log: Callable[[str], None]) -> TokenizedDataset:
    """Return the sequences whose prompts leave room for a completion.

    Raises:
        UserError: too many of them leave none.
    """
    section = config.on_policy
    room = Room(config.data.sequence_length, section.max_new_tokens, section.prompt_tokens)
    kept, line = with_room(dataset, room)
    if not line:
        return dataset
    log(f"on_policy: {line}")
    return replace(dataset.select(kept), notes=[*dataset.notes, line])


def open_writer(
    config: Config,
    dataset: TokenizedDataset,
    copy: GatheredStudent | None,
    tokenizer: Any,
    ids: int,
    pad_id: int,
    device: torch.device,
    checkpoint: Checkpoint | None,
) -> StudentWriter | None:
    """Return who writes, with what the checkpoint carries taken up; None in a run where the student writes nothing.

    Args:
        ids: ids from here on are never written, since one side does not know them.

    Raises:
        UserError: what the student wrote is missing from the checkpoint, or damaged.
    """
    if not student_writes(config) or copy is None:
        return None
    section = config.on_policy
    texts = OnPolicyTexts(dataset, section, config.seed, config.global_batch_sequences, config.train.steps)
    if checkpoint is not None:
        path = checkpoint.directory / FILE
        try:
            kept = from_text(path.read_text(encoding="utf-8"), str(path))
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        texts.restore(checkpoint.step, kept, str(path))
    return StudentWriter(
        texts,
        copy,
        Sampler(section.temperature, section.top_p, section.top_k, ids),
        end_ids(copy.model, tokenizer),
        pad_id,
        config.seed,
        config.train.micro_batch_sequences,
        device,
    )
