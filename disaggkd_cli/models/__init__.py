"""Causal language models: loading them, splitting off their heads, and cutting a student out of a teacher."""

from disaggkd_cli.models.attention import require_attention, set_attention, set_attention_of_checks
from disaggkd_cli.models.fingerprint import model_fingerprint
from disaggkd_cli.models.head import (
    backbone_of,
    head_of,
    head_semantics,
    hidden_states,
    states_and_router_logits,
    verify_split,
)
from disaggkd_cli.models.layers import decoder_layers, student_from_layers
from disaggkd_cli.models.load import (
    ModelSource,
    load_causal_lm,
    load_config,
    load_head,
    load_head_shard,
    resolve_source,
    teacher_source,
)
from disaggkd_cli.models.packing import (
    decide_packing,
    leak_tolerance,
    packs_documents,
    relative_difference,
    verify_packing,
)
from disaggkd_cli.models.requested import requested_states
from disaggkd_cli.models.router import RouterLoss, router_loss_of
from disaggkd_cli.models.student import build_student
from disaggkd_cli.models.vocabulary import verify_ids

__all__ = [
    "ModelSource",
    "RouterLoss",
    "backbone_of",
    "build_student",
    "decide_packing",
    "decoder_layers",
    "head_of",
    "head_semantics",
    "hidden_states",
    "leak_tolerance",
    "load_causal_lm",
    "load_config",
    "load_head",
    "load_head_shard",
    "model_fingerprint",
    "packs_documents",
    "relative_difference",
    "requested_states",
    "require_attention",
    "resolve_source",
    "router_loss_of",
    "set_attention",
    "set_attention_of_checks",
    "states_and_router_logits",
    "student_from_layers",
    "teacher_source",
    "verify_ids",
    "verify_packing",
    "verify_split",
]
