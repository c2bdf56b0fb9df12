"""Evaluate on held-out text: language-model loss, perplexity, divergence from the teacher, top-1 agreement."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from disaggkd_cli.errors import RunError
from disaggkd_cli.training.schedule import WorkPlan
from disaggkd_cli.training.sources import TeacherRows
from disaggkd_cli.training.student_module import StudentModule


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
    sums = torch.zeros(3, dtype=torch.float64)
    for _ in range(plan.eval_items):
        rows = take()
        if not rows.item.evaluation or rows.item.step != step:
            raise RunError(f"the stream has step {rows.item.step} where the evaluation after step {step} was due")
        _, out = module(rows.item.batch.to(device), rows.hidden, plan.eval_rows, evaluation=True)
        sums += torch.stack([out.ce, out.kd, out.top1_agreement]).double().cpu()
        rows.release()
    module.train()
    dist.all_reduce(sums)
    lm_loss, kd, agreement = sums.tolist()
    return {
        "eval_lm_loss": lm_loss,
        "eval_perplexity": math.exp(min(lm_loss, 700.0)),
        "eval_kd": kd,
        "eval_top1_agreement": agreement,
    }
