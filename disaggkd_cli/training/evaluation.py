"""Evaluate on held-out text: both models' loss and perplexity, their divergence, their top-1 agreement."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from disaggkd_cli.errors import RunError
from disaggkd_cli.training.schedule import WorkPlan
from disaggkd_cli.training.sources import TeacherRows
from disaggkd_cli.training.student_module import StudentModule

_GUESS = 0.95
"""Share of a uniform guess's cross-entropy above which a model has learnt nothing."""
_CLEARLY_WORSE = 1e-3
"""Nats; a student that starts as its teacher differs from it by rounding."""


@torch.no_grad()
def evaluate(
    module: StudentModule, take: Callable[[], TeacherRows], plan: WorkPlan, step: int, device: torch.device
) -> dict[str, float]:
    """Consume one evaluation from the stream and return its figures, over all ranks.

    Args:
        take: hands out the next item of the stream.
        step: optimizer steps done, which the items must carry.

    Raises:
        RunError: when the stream has something else next.
    """
    module.eval()
    sums = torch.zeros(5, dtype=torch.float64, device=device)
    for _ in range(plan.eval_items):
        rows = take()
        if not rows.item.evaluation or rows.item.step != step:
            raise RunError(f"the stream has step {rows.item.step} where the evaluation after step {step} was due")
        _, out = module(rows.item.batch.to(device), rows.hidden, plan.eval_rows, evaluation=True)
        sums += torch.stack([out.ce, out.kd, out.top1_agreement, out.teacher_ce, out.hidden]).double()
        rows.release()
    module.train()
    sums = sums.cpu()
    dist.all_reduce(sums)
    lm_loss, kd, agreement, teacher_loss, hidden = sums.tolist()
    own = {} if module.projection is None else {"eval_hidden": hidden}
    return {
        "eval_lm_loss": lm_loss,
        "eval_perplexity": perplexity(lm_loss),
        "eval_kd": kd,
        "eval_top1_agreement": agreement,
        "eval_teacher_lm_loss": teacher_loss,
        "eval_teacher_perplexity": perplexity(teacher_loss),
        **own,
    }


def perplexity(loss: float) -> float:
    """Return exp of a mean cross-entropy in nats, or a very large number where that is too large."""
    return math.exp(min(loss, 700.0))


def no_better_than_guessing(loss: float, vocabulary: int) -> bool:
    """Whether a mean cross-entropy in nats is that of weights which were never trained.

    A uniform guess over `vocabulary` ids costs its logarithm; random weights come to about that, some below and some
    above, and anything that learnt even how often each id occurs to much less.
    """
    return loss > _GUESS * math.log(vocabulary)


def doubts_about_teacher(figures: dict[str, float], vocabulary: int) -> list[str]:
    """Return what a person should know of the teacher before training begins, a line each; often nothing.

    Args:
        figures: of `evaluate`, before the first step.
        vocabulary: ids that the loss is over.
    """
    teacher, student = figures["eval_teacher_lm_loss"], figures["eval_lm_loss"]
    if no_better_than_guessing(teacher, vocabulary):
        return [
            f"warning: the teacher is no better than guessing: its loss on the held-out text is {teacher:.3f} nats, a "
            f"guess among {vocabulary:,} ids costs {math.log(vocabulary):.3f}; look at teacher.model's weights and at "
            "the texts"
        ]
    if teacher > student + _CLEARLY_WORSE:
        return [
            f"warning: the teacher is worse than the student that shall learn from it: held-out perplexity "
            f"{perplexity(teacher):,.1f} against {perplexity(student):,.1f}; are teacher.model and student.model the "
            "right way round, and right for these texts?"
        ]
    return []
