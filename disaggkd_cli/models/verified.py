"""The teacher, loaded and verified: its head is what the model itself uses, and packed documents stay apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from disaggkd_cli.config import Config
from disaggkd_cli.losses import Head
from disaggkd_cli.models.attention import require_attention, set_attention, set_attention_of_checks
from disaggkd_cli.models.head import backbone_of, head_of, verify_split
from disaggkd_cli.models.load import DTYPES, ModelSource, load_causal_lm, teacher_source
from disaggkd_cli.models.packing import decide_packing, verify_packing


@dataclass(frozen=True)
class VerifiedTeacher:
    """A teacher without its head, which has been verified and is not used where only hidden states are computed.

    Attributes:
        source: where it was read from.
        backbone: ends in the final hidden states, after the last norm; in eval mode.
        vocabulary_size: V_t, ids that its head has.
        hidden_size: H_t.
        head: a copy of the head's part that `keep_head` asked for.
    """

    source: ModelSource
    backbone: nn.Module
    vocabulary_size: int
    hidden_size: int
    head: Head | None = None

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"teacher.model {self.source.name}"


def load_verified_teacher(
    config: Config,
    device: torch.device,
    *,
    check_packing: bool = True,
    keep_head: Callable[[int], tuple[int, int]] | None = None,
) -> VerifiedTeacher:
    """Load `teacher.model` in `teacher.dtype`, move it to `device`, verify its split, and let go of its head.

    Args:
        config: the run.
        device: where it is to be verified.
        check_packing: verify also, where this run packs documents, that they do not see each other.
        keep_head: from V_t to `(start, stop)`, the ids whose part of the head is copied and returned; by default
            nothing is kept, and an untied head gives its memory back.

    Raises:
        UserError: the model cannot be read, split or packed, or has no such attention as `teacher.attention`.
    """
    attention = config.teacher.attention
    require_attention(attention, "teacher.attention")
    source = teacher_source(config)
    model = load_causal_lm(source, DTYPES[config.teacher.dtype], "teacher.model").to(device)
    set_attention_of_checks(model, attention, "teacher.attention", device)
    head = head_of(model)
    verify_split(model, head, f"teacher.model {source.name}")
    vocabulary, width = head.weight.shape
    kept = None
    if keep_head is not None:
        part = head.detached().rows(*keep_head(vocabulary))
        bias = None if part.bias is None else part.bias.clone()
        kept = Head(part.weight.clone(), bias, part.scale, part.softcap)
        del part
    teacher = VerifiedTeacher(source, backbone_of(model), vocabulary, width, kept)
    del model, head
    if check_packing:
        verify_packed_documents(config, teacher)
    set_attention(
        teacher.backbone, attention, "teacher.attention"
    )  # one that needs a GPU, where it was verified on the CPU
    return teacher


def verify_packed_documents(config: Config, teacher: VerifiedTeacher) -> None:
    """Verify, where this run packs documents into rows, that the teacher keeps them apart.

    Raises:
        UserError: it does not.
    """
    if decide_packing(config)[0]:
        verify_packing(teacher.backbone, teacher.vocabulary_size, teacher.name)
