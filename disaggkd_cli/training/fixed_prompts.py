"""What teacher and student write to the same few prompts, at each evaluation: sentences that a person can judge.

Greedy, without a cache of keys and values: a few tokens of a few prompts are recomputed whole for each next token, in
batches of one shape, through the same forwards as training (the student sharded as it is, the teacher wherever it is).
The teacher is frozen, so it writes once a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from disaggkd_cli.config import Config
from disaggkd_cli.config.on_policy import student_writes
from disaggkd_cli.data import IGNORE, MicroBatch, TokenizedDataset, collate
from disaggkd_cli.data import Sequence as TokenSequence
from disaggkd_cli.errors import UserError
from disaggkd_cli.losses import Head
from disaggkd_cli.losses.heads import apply_head
from disaggkd_cli.on_policy.completions import Completion
from disaggkd_cli.on_policy.prompts import prompt_length
from disaggkd_cli.training.samples import FIXED, ON_POLICY, Sample, SamplesTable
from disaggkd_cli.transport import TeachersLost

_BEGINNING = 24
"""Tokens of a running text that are a prompt."""
_MOST_PROMPT = 256
"""Tokens of a prompt whose last ones are kept."""

NextIds = Callable[[MicroBatch], Tensor]
"""From a micro-batch whose supervised rows are the last tokens of its texts, to the next id of each, [R]."""


def prompts_of(config: Config, held_out: TokenizedDataset, tokenizer: Any) -> list[list[int]]:
    """Return the prompts as token ids: those of `log.sample_prompts`, else beginnings of the first held-out texts.

    Where prompts are masked (chats, completions) a text is one up to its first supervised token; running text gives
    its first tokens. In an on-policy run they are what the student is asked to complete at evaluations.

    Raises:
        UserError: a prompt of the config is empty, or leaves no room for an answer.
    """
    log, tokens = config.log, _answer_tokens(config)
    room = config.data.sequence_length - tokens
    if log.sample_prompts:
        prompts = [tokenizer(text)["input_ids"] for text in log.sample_prompts]
        for text, ids in zip(log.sample_prompts, prompts, strict=True):
            if not 0 < len(ids) <= room:
                raise UserError(
                    f"log.sample_prompts: {text[:40]!r} is {len(ids)} tokens; before {tokens} tokens of "
                    f"an answer there must be at least 1 and at most {room} (data.sequence_length="
                    f"{config.data.sequence_length})"
                )
        return prompts
    found = []
    for index in range(len(held_out)):
        if len(found) == log.samples:
            break
        sequence = held_out.sequence(index)
        if student_writes(config):
            length = prompt_length(sequence.labels, config.on_policy.prompt_tokens)
            if 0 < length <= min(room, config.data.sequence_length - config.on_policy.max_new_tokens):
                found.append(sequence.input_ids[:length].tolist())
            continue
        first = sequence.document_lengths[0]
        asked = int(np.argmax(sequence.labels[:first] != IGNORE)) + 1
        # A label stands on the token before it, so running text is supervised from its first token on.
        length = asked if asked > 1 else min(_BEGINNING, first)
        prompt = sequence.input_ids[max(0, length - min(_MOST_PROMPT, room)) : length].tolist()
        if prompt and prompt not in found:
            found.append(prompt)
    return found


def _answer_tokens(config: Config) -> int:
    return max(1, min(config.log.sample_tokens, config.data.sequence_length // 2))


@torch.no_grad()
def write_greedily(
    prompts: Sequence[Sequence[int]], tokens: int, pad_id: int, next_ids: NextIds, ends: frozenset[int] = frozenset()
) -> list[list[int]]:
    """Return what follows each prompt: at most `tokens` ids, each the likeliest, up to and without one of `ends`.

    Every forward has the same shape, whatever was written so far, so that a compiled model is compiled once and all
    ranks of a sharded one step alike.
    """
    texts = [list(prompt) for prompt in prompts]
    width = max(map(len, texts)) + tokens
    ended = [False] * len(texts)
    for _ in range(tokens):
        chosen = next_ids(_batch(texts, width, pad_id)).tolist()
        for number, token in enumerate(chosen):
            ended[number] = ended[number] or token in ends
            if not ended[number]:
                texts[number].append(token)
        if all(ended):
            break
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def _batch(texts: Sequence[Sequence[int]], width: int, pad_id: int) -> MicroBatch:
    sequences = []
    for text in texts:
        labels = np.full(len(text), IGNORE, np.int64)
        labels[-1] = 0  # any id: what counts is which rows are asked for
        sequences.append(TokenSequence(np.asarray(text, np.int64), labels, (len(text),)))
    return collate(sequences, pad_id, width)


@dataclass
class FixedPrompts:
    """The prompts of one run, and the table where the answers go.

    Attributes:
        prompts: token ids.
        tokens: of an answer, at most.
        pad_id: fills short rows up.
        tokenizer: of both models.
        teacher_head: the frozen head, whole.
        table: on rank 0; None elsewhere.
        teacher_texts: what the teacher wrote, once it has.
    """

    prompts: list[list[int]]
    tokens: int
    pad_id: int
    tokenizer: Any
    teacher_head: Head
    table: SamplesTable | None
    teacher_texts: list[str] | None = field(default=None)

    def write(
        self,
        step: int,
        module: nn.Module,
        source: Any,
        device: torch.device,
        log: Callable[[str], None],
        completions: Sequence[Completion] = (),
    ) -> None:
        """Let both write, and keep what they wrote. Collective over all student ranks.

        Args:
            step: optimizer steps done.
            module: the student, whose forward without hidden states returns the next ids.
            source: the run's `HiddenStateSource`.
            device: where the student computes.
            log: takes a line where the teacher cannot be asked.
            completions: what the student of an on-policy run has drawn after held-out prompts; as many as there are
                fixed prompts are shown, beside the teacher's words where it was asked the same.
        """
        if self.teacher_texts is None:
            self.teacher_texts = self._ask_teacher(source, device, log)
        training = module.training
        module.eval()
        texts = self._texts(lambda batch: module(batch.to(device), None, 0).cpu())
        module.train(training)
        if self.table is None:
            return
        written = []
        for number, prompt in enumerate(self.prompts):
            asked = self.tokenizer.decode(prompt)
            if self.teacher_texts:
                written.append(Sample(step, FIXED, asked, "teacher", self.teacher_texts[number]))
            written.append(Sample(step, FIXED, asked, "student", texts[number]))
        self.table.write([*written, *self.drawn(step, completions)])

    def drawn(self, step: int, completions: Sequence[Completion]) -> Iterator[Sample]:
        """Yield as many completions as there are prompts, each behind the teacher's words where those are known."""
        known = dict(zip(map(tuple, self.prompts), self.teacher_texts or [], strict=False))
        for one in completions[: len(self.prompts)]:
            asked = self.tokenizer.decode(one.prompt)
            if one.prompt in known:
                yield Sample(step, ON_POLICY, asked, "teacher", known[one.prompt])
            yield Sample(step, ON_POLICY, asked, "student", self.tokenizer.decode(one.ids))

    def _ask_teacher(self, source: Any, device: torch.device, log: Callable[[str], None]) -> list[str]:
        """Return what the teacher writes; nothing on ranks that have no part in it, or where it cannot be asked."""
        asking: AbstractContextManager[Callable[[MicroBatch], Tensor]] | None = source.aside(len(self.prompts))
        if asking is None:
            log("samples: the teacher is not here to be asked (teacher.cache), so the student's texts stand alone")
            return []
        if source.asks_alone and self.table is None:
            return []
        try:
            with asking as states_of:
                return self._texts(lambda batch: self._teacher_ids(states_of(batch)))
        except TeachersLost as lost:
            log(f"samples: the teacher's texts are missing: {lost}")
            return []

    def _teacher_ids(self, hidden: Tensor) -> Tensor:
        head = self.teacher_head
        return apply_head(hidden.to(head.weight.device, head.weight.dtype), head).argmax(-1).cpu()

    def _texts(self, next_ids: NextIds) -> list[str]:
        end = self.tokenizer.eos_token_id
        ends = frozenset() if end is None else frozenset([end])
        written = write_greedily(self.prompts, self.tokens, self.pad_id, next_ids, ends)
        return [self.tokenizer.decode(ids) for ids in written]


def fixed_prompts(
    config: Config,
    held_out: TokenizedDataset,
    tokenizer: Any,
    teacher_head: Head,
    pad_id: int,
    table: SamplesTable | None,
    recorded: Sequence[Sample],
    sharded_heads: bool,
    log: Callable[[str], None],
) -> FixedPrompts | None:
    """Return the prompts of a run, or None where none are asked for. Collective over all student ranks.

    Args:
        table: on rank 0; None elsewhere.
        recorded: what the table holds of an earlier start, on rank 0.
        sharded_heads: whether ranks hold shards of the heads, with which no text can be written.
        log: takes a line where no texts can be written.

    Raises:
        UserError: see `prompts_of`.
    """
    if config.log.samples == 0:
        return None
    if sharded_heads:
        log("samples: none are written where the heads lie in shards (loss.vocabulary_parallel)")
        return None
    prompts = prompts_of(config, held_out, tokenizer)
    if not prompts:
        return None
    found = FixedPrompts(prompts, _answer_tokens(config), pad_id, tokenizer, teacher_head, table)
    asked = [tokenizer.decode(prompt) for prompt in prompts]
    known = {one.prompt: one.text for one in recorded if one.table == FIXED and one.writer == "teacher"}
    on_record = torch.tensor([int(table is not None and all(prompt in known for prompt in asked))])
    dist.broadcast(on_record, src=0)
    if on_record.item():
        found.teacher_texts = [known[prompt] for prompt in asked] if table is not None else []
    return found
