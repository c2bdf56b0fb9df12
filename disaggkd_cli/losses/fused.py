"""The fused loss: exact distillation and cross-entropy without the logits of all rows."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from disaggkd_cli.losses.arguments import (
    IGNORED_LABEL,
    LossArgumentError,
    check_hyperparameters,
    check_tensors,
    token_count,
)
from disaggkd_cli.losses.divergences import divergence_named
from disaggkd_cli.losses.groups import VocabularyShard, agree_on_shards
from disaggkd_cli.losses.heads import Head, gathered
from disaggkd_cli.losses.matmul import choose_precision, cost_model, needs_sum_buffer, result_dtype
from disaggkd_cli.losses.output import LossOutput
from disaggkd_cli.losses.passes import Problem, Result, Side, run_passes
from disaggkd_cli.losses.pointwise import PointwiseSpec, can_compile, compiles, tile_kernels
from disaggkd_cli.losses.shape import SideProducts, loss_shape
from disaggkd_cli.losses.tiling import choose_tiling
from disaggkd_cli.units import parse_bytes

DEFAULT_BUDGET = {"cpu": 256 * 2**20, "cuda": 2**30}


@torch.compiler.disable
def fused_kd_loss(
    student_hidden: Tensor,
    student_head: Head,
    teacher_hidden: Tensor,
    teacher_head: Head,
    labels: Tensor | None = None,
    divergence: str = "forward_kl",
    temperature: float = 1.0,
    beta: float = 0.5,
    kd_weight: float = 1.0,
    ce_weight: float = 0.0,
    num_tokens: int | float | Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    memory_budget: int | str | None = None,
    compile_pointwise: bool | None = None,
    supervised: Tensor | Literal["all"] | None = None,
) -> LossOutput:
    """Return the distillation loss of R rows, with gradients ready and scratch within `memory_budget`.

    The teacher is a constant: nothing of it gets a gradient. Gradients are computed here, in the forward pass, and
    scaled in the backward pass; so a second backward pass through the same loss raises (in float64 it works, for
    gradcheck). Logits and statistics are float32 whatever the inputs (float64 where an input is); under autocast the
    matrix products take operands rounded to autocast's dtype.

    Args:
        student_hidden: [R, H_s].
        student_head: weight [V, H_s]; with `group`, this rank's shard.
        teacher_hidden: [R, H_t].
        teacher_head: weight [V_t, H_t]; with `group`, this rank's shard, cut at the same ids as the student's.
        labels: [R] int64 token ids, -100 for a row that is not supervised. None: every row is supervised, and
            there is no CE.
        divergence: one of DIVERGENCES.
        temperature: both models' logits are divided by it in the divergence; the divergence is multiplied by its
            square.
        beta: teacher's share in `jsd`'s mixture and `skewed_forward_kl`'s, student's share in `skewed_reverse_kl`'s,
            and weight of forward KL in `symmetric_kl`.
        kd_weight, ce_weight: weights of the two parts.
        num_tokens: what the sums over rows are divided by; default: the supervised rows here. Give the global count (a
            number or a scalar tensor) under accumulation or data parallelism. Counts below one are taken as one.
        group: ranks that hold a shard of both heads each, and the same rows. Each gets the whole loss, the whole
            gradient of its hidden states and the gradient of its own shard; nothing is to be reduced over this group
            afterwards.
        memory_budget: bytes of scratch beside inputs and gradients, as a number or like "256MiB"; default 256 MiB on
            CPUs and 1 GiB on GPUs.
        compile_pointwise: whether torch.compile fuses the elementwise part. Default: from 2**24 rows * columns on.
        supervised: where the caller knows them already, the indices of the supervised rows, [R'] int64 and ascending,
            or "all". Their labels are then taken for ids of the student's vocabulary unseen, and no GPU is waited for.
            Default: found from `labels`.

    Raises:
        LossArgumentError: an argument can't be right; a UserError and a ValueError.
        UserError: the budget is too small for the smallest tile; it names what would do.
    """
    teacher_head = gathered(teacher_head) if isinstance(teacher_head, Head) else teacher_head
    check_hyperparameters(divergence, temperature, beta, kd_weight, ce_weight)
    check_tensors(student_hidden, student_head, teacher_hidden, teacher_head, labels, ce_weight)
    teacher_head = teacher_head.detached()
    bias = student_head.bias
    differentiable = [student_hidden, student_head.weight, bias]
    needs = [torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in differentiable]
    device = student_hidden.device
    budget = DEFAULT_BUDGET.get(device.type, 2**28) if memory_budget is None else parse_bytes(memory_budget)
    shard, budget, (hidden_gradient, gradients, cannot_compile) = agree_on_shards(
        group, len(student_hidden), len(student_head.weight), len(teacher_head.weight), budget,
        (int(needs[0]), int(any(needs)), int(not can_compile())), device,
    )  # fmt: skip
    rows, labels, count = _supervised_rows(labels, shard, len(student_hidden), supervised)
    normaliser = token_count(num_tokens, count, device, torch.float64 if device.type != "mps" else torch.float32)
    spec = _spec(
        student_head, teacher_head, labels, divergence, temperature, beta, kd_weight, ce_weight, shard, gradients
    )
    problem = _problem(
        student_hidden.detach(), student_head.detached(), teacher_hidden.detach(), teacher_head, labels, rows, count,
        spec, shard, budget, (bool(hidden_gradient), needs[1], needs[2]), bool(gradients), compile_pointwise,
        not cannot_compile,
        normaliser,
    )  # fmt: skip
    # Inside, dtypes are chosen one by one; autocast must not choose again.
    with torch.autocast(device.type, enabled=False):
        if any(needs):
            parts = _FusedLoss.apply(student_hidden, student_head.weight, bias, problem, normaliser)
        else:
            with torch.no_grad():
                parts = _parts(run_passes(problem), problem, normaliser)
    return LossOutput(*parts)


class _FusedLoss(torch.autograd.Function):
    """Computes gradients with the loss; the backward pass only scales them."""

    @staticmethod
    def forward(ctx, student_hidden, weight, bias, problem, normaliser):
        result = run_passes(problem)
        ctx.gradients = (result.hidden if ctx.needs_input_grad[0] else None, result.weight, result.bias)
        ctx.dtypes = (student_hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.normaliser = normaliser
        ctx.hidden_is_normalised = problem.hidden_factor is not None
        parts = _parts(result, problem, normaliser)
        ctx.mark_non_differentiable(*parts[1:])
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, *_):
        if ctx.gradients is None:
            raise RuntimeError(
                "fused_kd_loss computes its gradients once: a second backward pass through the same loss is not "
                "possible. Compute the loss again"
            )
        factor = grad_loss / ctx.normaliser
        factors = (grad_loss if ctx.hidden_is_normalised else factor, factor, factor)
        scaled = tuple(
            None if gradient is None else _scaled(gradient, factor, dtype)
            for gradient, factor, dtype in zip(ctx.gradients, factors, ctx.dtypes, strict=True)
        )
        if torch.float64 not in ctx.dtypes:
            ctx.gradients = None
        return *scaled, None, None


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """`gradient * factor` in `dtype`: in place where dtypes allow, and without a third copy where they do not."""
    factor = factor.to(torch.promote_types(gradient.dtype, torch.float32))
    if dtype == torch.float64:
        return gradient * factor
    if gradient.dtype == dtype:
        return gradient.mul_(factor)
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))


def _parts(result: Result, problem: Problem, normaliser: Tensor) -> tuple[Tensor, ...]:
    """loss, kd, ce, agreement and the dropped masses, each a scalar, from sums over rows."""
    kd, ce, agreement, dropped_teacher, dropped_student = (result.sums / normaliser).unbind()
    spec = problem.spec
    loss = spec.kd_weight * spec.temperature**2 * kd + spec.ce_weight * ce
    dtype = problem.student.precision.result
    return tuple(part.to(dtype) for part in (loss, kd, ce, agreement, dropped_teacher, dropped_student))


def _supervised_rows(
    labels: Tensor | None, shard: VocabularyShard, rows: int, known: Tensor | str | None
) -> tuple[Tensor | None, Tensor | None, int]:
    """Indices of the supervised rows (None: all), their labels, and their number."""
    if labels is None:
        return None, None, rows
    if isinstance(known, Tensor) and len(known) < rows:
        return known, labels[known], len(known)
    if known is not None:
        return None, labels, rows
    counts = labels != IGNORED_LABEL
    wrong = counts & ((labels < 0) | (labels >= shard.student_vocabulary))
    # The one place where a GPU is waited for.
    count, wrong = torch.stack([counts.sum(), wrong.sum()]).tolist()
    if wrong:
        raise LossArgumentError(
            f"{wrong} labels are no token ids: they must lie between 0 and {shard.student_vocabulary - 1}, or be "
            f"{IGNORED_LABEL} for rows that are not supervised"
        )
    indices = None
    if count < rows:
        indices = counts.nonzero().squeeze(1)
        labels = labels[indices]
    return indices, labels, count


def _spec(
    student_head: Head, teacher_head: Head, labels: Tensor | None, divergence: str, temperature: float, beta: float,
    kd_weight: float, ce_weight: float, shard: VocabularyShard, gradients: int,
) -> PointwiseSpec:  # fmt: skip
    return PointwiseSpec(
        divergence=divergence_named(divergence),
        beta=float(beta),
        temperature=float(temperature),
        kd_weight=float(kd_weight),
        ce_weight=0.0 if labels is None else float(ce_weight),
        student_scale=float(student_head.scale),
        student_softcap=None if student_head.softcap is None else float(student_head.softcap),
        teacher_scale=float(teacher_head.scale),
        teacher_softcap=None if teacher_head.softcap is None else float(teacher_head.softcap),
        plain_is_shared=temperature == 1.0 and shard.student_vocabulary <= shard.teacher_vocabulary,
    )


def _problem(
    student_hidden: Tensor, student_head: Head, teacher_hidden: Tensor, teacher_head: Head, labels: Tensor | None,
    rows: Tensor | None, count: int, spec: PointwiseSpec, shard: VocabularyShard, budget: int,
    needs: tuple[bool, bool, bool], gradients: bool, compile_pointwise: bool | None, compilable: bool,
    normaliser: Tensor,
) -> Problem:  # fmt: skip
    dtype = result_dtype(student_hidden, student_head.weight, teacher_hidden, teacher_head.weight)
    student, teacher = _side(student_hidden, student_head, dtype), _side(teacher_hidden, teacher_head, dtype)
    compiled = compiles(count * shard.largest[0], compile_pointwise, compilable)
    shape = loss_shape(
        count, *shard.largest, _products(student), _products(teacher), spec.divergence,
        hidden_bytes=student_hidden.dtype.itemsize,
        result_bytes=dtype.itemsize,
        gathered=rows is not None,
        joined=shard.group is not None,
        adds_into_sums=not needs_sum_buffer(student_hidden.device, student.precision),
        gradients=gradients,
        hidden_gradient=needs[0],
        weight_gradient=needs[1],
        compiled=compiled,
        device=cost_model(student_hidden.device),
    )  # fmt: skip
    tiling = choose_tiling(shape, budget)
    kernels = tile_kernels(spec, compiled, tiling.block)
    return Problem(
        student=student,
        teacher=teacher,
        labels=labels,
        rows=rows,
        count=count,
        spec=spec,
        kernels=kernels,
        shard=shard,
        tiling=tiling,
        gradients=gradients,
        hidden_gradient=needs[0],
        weight_gradient=needs[1],
        bias_gradient=needs[2],
        # Divided before its only rounding; in fp16 small gradients would vanish before a loss scale can lift them.
        hidden_factor=None if student_hidden.dtype == torch.float16 else normaliser.reciprocal().to(dtype),
    )


def _side(hidden: Tensor, head: Head, dtype: torch.dtype) -> Side:
    changes_product = head.bias is not None or head.scale != 1.0 or head.softcap is not None
    return Side(hidden, head.weight, head.bias, choose_precision(hidden, head.weight, dtype), changes_product)


def _products(side: Side) -> SideProducts:
    precision = side.precision
    return SideProducts(
        side.hidden.shape[1],
        precision.copy_bytes(side.hidden, side.weight),
        precision.operand.itemsize,
        precision.gradient.itemsize,
    )
