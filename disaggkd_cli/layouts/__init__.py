"""How a teacher may be laid out over the ranks of a replica: the one place that knows, for plans and runs alike."""

from disaggkd_cli.layouts.rules import (
    AUTO,
    EACH_RANK_SERVES,
    FSDP,
    PARALLELISMS,
    PIPELINE,
    TENSOR,
    Layout,
    asked_layout,
    choose,
    require,
    why_not,
)
from disaggkd_cli.layouts.teacher import TeacherFacts, facts_of
from disaggkd_cli.layouts.tensor_plans import tensor_plan

__all__ = [
    "AUTO",
    "EACH_RANK_SERVES",
    "FSDP",
    "PARALLELISMS",
    "PIPELINE",
    "TENSOR",
    "Layout",
    "TeacherFacts",
    "asked_layout",
    "choose",
    "facts_of",
    "require",
    "tensor_plan",
    "why_not",
]
