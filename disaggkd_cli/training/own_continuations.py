"""Evaluate where the student's own words lead: the divergence on its continuations of held-out prompts."""

from __future__ import annotations

import torch
import torch.distributed as dist

from disaggkd_cli.data import MicroBatch, TokenizedDataset, collate, empty_micro_batch
from disaggkd_cli.on_policy.completions import Completion
from disaggkd_cli.on_policy.prompts import Room, prompt_of
from disaggkd_cli.on_policy.proportion import WrittenPlace
from disaggkd_cli.on_policy.writer import StudentWriter
from disaggkd_cli.training.sources import HiddenStateSource
from disaggkd_cli.training.student_module import StudentModule
from disaggkd_cli.transport import TeachersLost

OWN_KD = "eval_on_policy_kd"


@torch.no_grad()
def evaluate_own_continuations(
    module: StudentModule, source: HiddenStateSource, writer: StudentWriter, held_out: TokenizedDataset, length: int
) -> tuple[dict[str, float], list[Completion]]:
    """Return the divergence, and how long continuations are, over all ranks; and what this rank's prompts became.

    Collective over the student ranks.

    Each rank completes a micro-batch of the first held-out prompts that leave room, with numbers of its own that are
    the same at each evaluation. No figures where all completions are empty, or no prompt has room.

    Args:
        length: longest sequence of a row, in tokens.

    Raises:
        TeachersLost: on every rank.
    """
    module.eval()
    try:
        batch, texts = _own_batch(module, writer, held_out, length)
        counted = torch.tensor([batch.supervised_count, len(texts), sum(len(one.ids) for one in texts)])
        dist.all_reduce(counted)
        rows, number, tokens = counted.tolist()
        if not rows:
            return {}, texts
        room = writer.batch * writer.texts.section.max_new_tokens
        with source.aside(room) as states_of:
            lost = hidden = None
            try:
                hidden = states_of(batch)
            except TeachersLost as error:
                lost = error
            lacking = torch.tensor([int(lost is not None)])
            dist.all_reduce(lacking, op=dist.ReduceOp.MAX)  # none may start a forward alone
            if lacking.item():
                raise lost or TeachersLost("another student rank has no teacher left")
            _, out = module(batch.to(writer.device), hidden, rows, evaluation=True)
            divergence = out.kd.double().cpu()
        dist.all_reduce(divergence)
        return {OWN_KD: divergence.item(), "eval_completion_tokens_mean": tokens / number}, texts
    finally:
        module.train()


def _own_batch(
    module: StudentModule, writer: StudentWriter, held_out: TokenizedDataset, length: int
) -> tuple[MicroBatch, list[Completion]]:
    """Return what this rank's prompts became; a row of padding where it has none."""
    section, rank = writer.texts.section, dist.get_rank()
    room = Room(length, section.max_new_tokens, section.prompt_tokens)
    chosen: list[int] = []
    for index in range(len(held_out)):
        if len(chosen) == writer.batch * (rank + 1):
            break
        if room.has(held_out.sequence(index)):
            chosen.append(index)
    own = chosen[writer.batch * rank :]
    with writer.copy.with_weights(module.model) as model:
        if not own:
            return empty_micro_batch(1, 8, writer.pad_id), []
        prompts = [prompt_of(held_out.sequence(index), section.prompt_tokens).tolist() for index in own]
        texts = writer.complete(model, "eval", [WrittenPlace(index, index, 0) for index in own], prompts)
    return collate([one.sequence() for one in texts], writer.pad_id), texts
