"""The elementwise and row-reducing part of the fused loss on one tile, written once and compiled where that pays.

Shapes: w rows of a window, v columns of a shard. Logits come in as matrix products and are turned into a head's logits
in place (bias, scale, soft cap), later into gradients in place.
"""

from __future__ import annotations

import functools
import itertools
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from disaggkd_cli.losses.divergences import Divergence

COMPILE_FROM_ELEMENTS = 2**24
"""Rows times columns of one loss from which compiling pays: eager torch loses some 75 ms there on two CPU threads."""
_SMALLEST_COMPILED = 2
"""torch.compile treats sizes 0 and 1 as constants of their own; such tiles go the eager way, not to compile again."""
SHARED_STATISTICS = (
    "student_lse", "teacher_lse", "student_lse_plain", "forward_kl", "reverse_kl", "student_max", "teacher_max",
    "student_first", "teacher_first", "label_logit",
)  # fmt: skip
"""What the statistics of shared columns are, by the names of RowStatistics."""
_BLOCK_AFTER_FAILURE = 2**14
"""Elements of a block of the eager part where a compiler turned out not to work, and no block was planned."""
_NO_FAULT_OF_COMPILERS = (
    torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError), MemoryError
)  # fmt: skip
_compiler_failed = False
_numbers = itertools.count()


@dataclass(frozen=True)
class PointwiseSpec:
    """The constants of a loss; one spec compiles once.

    Attributes:
        divergence: its entry.
        beta, temperature, kd_weight, ce_weight: as in `fused_kd_loss`; `ce_weight` 0.0 where there are no labels.
        student_scale, student_softcap, teacher_scale, teacher_softcap: as in `Head`.
        plain_is_shared: the student's log-sum-exp at temperature 1 over its whole vocabulary is the tempered one over
            the shared ids, since the temperature is 1 and it has no other ids.
    """

    divergence: Divergence
    beta: float
    temperature: float
    kd_weight: float
    ce_weight: float
    student_scale: float
    student_softcap: float | None
    teacher_scale: float
    teacher_softcap: float | None
    plain_is_shared: bool


@dataclass(frozen=True)
class TileKernels:
    """The functions on one tile for one spec; see the functions of this module that build them."""

    statistics: Callable
    row_terms: Callable
    gradient: Callable
    student_head: Callable
    teacher_head: Callable
    extra_statistics: Callable
    extra_gradient: Callable


def can_compile() -> bool:
    """Return whether torch.compile may be tried here and now.

    Not where it was tried in this process and failed, and not under a torch dispatch mode: what counts FLOPs or memory
    operation by operation sees nothing of compiled code, and torch refuses it there.
    """
    return not _compiler_failed and not torch._C._len_torch_dispatch_stack()


def compiles(elements: int, asked: bool | None, possible: bool) -> bool:
    """Return whether the pointwise part of a loss over `elements` logits is compiled: where `asked`, or where it pays.

    Not with `possible` False (see `can_compile`); where a dispatch mode is the reason, a warning says so once.
    """
    wanted = elements >= COMPILE_FROM_ELEMENTS if asked is None else asked
    if wanted and torch._C._len_torch_dispatch_stack():
        _warn_of_dispatch_mode()
    return wanted and possible


def tile_kernels(spec: PointwiseSpec, compiled: bool, block_elements: int) -> TileKernels:
    """Return the kernels of `spec`, compiled or eager in blocks of `block_elements`.

    Kernels compile on first use. Where no compiler works, a warning says so once and they run eagerly.
    """
    plain, block_elements = _built(spec), block_elements or _BLOCK_AFTER_FAILURE
    eager = [functools.partial(_in_row_blocks, function, block_elements=block_elements) for function in plain]
    extra = [
        functools.partial(_in_row_blocks, function, block_elements=block_elements)
        for function in (_extra_statistics(spec), _extra_gradient(spec))
    ]
    if not compiled:
        return TileKernels(*eager, *extra)
    either = [functools.partial(_compiled_or_eager, *pair) for pair in zip(_compiled(spec), eager, strict=True)]
    return TileKernels(*either, *extra)


def _built(spec: PointwiseSpec) -> tuple[Callable, ...]:
    student_head = _head(spec.student_scale, spec.student_softcap)
    teacher_head = _head(spec.teacher_scale, spec.teacher_softcap)
    return _statistics(spec), _row_terms(spec), _gradient(spec), student_head, teacher_head


@functools.lru_cache(maxsize=32)
def _compiled(spec: PointwiseSpec) -> tuple[Callable, ...]:
    return tuple(torch.compile(_with_own_code(function), dynamic=True, fullgraph=True) for function in _built(spec))


def _with_own_code(function: Callable) -> Callable:
    """Return `function` with a code object of its own.

    torch.compile keeps what it compiled by code object and gives up after a few variants; the kernels of all specs are
    closures over the same code.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    return types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)


def _compiled_or_eager(compiled: Callable, eager: Callable, *arguments: Tensor | None) -> tuple[Tensor, ...]:
    if _compiler_failed or min(arguments[0].shape) < _SMALLEST_COMPILED:
        return eager(*arguments)
    try:
        return compiled(*arguments)
    except Exception as error:
        # Memory and the device fail in eager torch as well. Anything else, of whatever class, comes before the kernel
        # has changed a tensor: from the compiler, or from those that it calls (Triton, a C++ compiler, the disk).
        if isinstance(error, _NO_FAULT_OF_COMPILERS):
            raise
        _give_up_compiling(error)
        return eager(*arguments)


def _give_up_compiling(error: Exception) -> None:
    global _compiler_failed
    _compiler_failed = True
    warnings.warn(
        "torch.compile does not work here, so the pointwise part of the loss runs in eager torch: correct, but "
        f"slower. A C++ compiler (CPU), or Triton and a C compiler (GPU), mends it. The reason: "
        f"{(str(error).strip() or type(error).__name__).splitlines()[0]}",
        stacklevel=3,
    )


@functools.cache
def _warn_of_dispatch_mode() -> None:
    warnings.warn(
        "a torch dispatch mode is active (a counter of FLOPs or memory, say), under which torch compiles nothing: the "
        "pointwise part of the loss runs in eager torch there, correct, but slower",
        stacklevel=3,
    )


def _in_row_blocks(function: Callable, *arguments: Tensor | None, block_elements: int) -> tuple[Tensor, ...]:
    """Call `function` on blocks of rows, so that its temporaries stay small. Vectors of the columns come as [1, v]."""
    rows, columns = arguments[0].shape
    block = max(1, block_elements // max(columns, 1))
    if rows <= block:
        return function(*arguments)
    results = []
    for start in range(0, rows, block):
        part = [a[start : start + block] if isinstance(a, Tensor) and a.shape[0] == rows else a for a in arguments]
        results.append(function(*part))
    return tuple(torch.cat(column) for column in zip(*results, strict=True))


def _head_logits(product: Tensor, bias: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """Turn matrix products [w, v] into logits, in place, and return them. `bias` is [1, v]."""
    if bias is None and scale == 1.0 and softcap is None:
        return product
    logits = product if bias is None else product + bias
    if scale != 1.0:
        logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits * (1.0 / softcap))
    return product.copy_(logits)


def _head(scale: float, softcap: float | None) -> Callable:
    """Build `f(product [w, v], bias [1, v])`, which makes logits of matrix products in place."""

    def head(product: Tensor, bias: Tensor | None) -> tuple[()]:
        _head_logits(product, bias, scale, softcap)
        return ()

    return head


def _statistics(spec: PointwiseSpec) -> Callable:
    """Build `f(student [w, v], teacher [w, v], student_bias, teacher_bias, ids [1, v], labels [w, 1])`.

    It returns SHARED_STATISTICS, each [w]. `ids` are the tokens that the columns stand for and, like `labels`, int32;
    without `labels` the label's logit is zero.
    """
    inverse = 1.0 / spec.temperature
    infinity = float("inf")
    divergence = spec.divergence

    def statistics(
        student: Tensor, teacher: Tensor, student_bias: Tensor | None, teacher_bias: Tensor | None, ids: Tensor,
        labels: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        student = _head_logits(student, student_bias, spec.student_scale, spec.student_softcap)
        teacher = _head_logits(teacher, teacher_bias, spec.teacher_scale, spec.teacher_softcap)
        student_max, teacher_max = student.amax(-1, keepdim=True), teacher.amax(-1, keepdim=True)
        # Dividing by the temperature keeps the order, so the largest stay the largest.
        u_max, w_max = student_max * inverse, teacher_max * inverse
        u, w = student * inverse - u_max, teacher * inverse - w_max
        u_exp, w_exp = u.exp(), w.exp()
        u_max, w_max = u_max.squeeze(-1), w_max.squeeze(-1)
        # A row of minus infinities has differences that are no numbers; it weighs nothing.
        u_sum = torch.where(u_max == -infinity, 0.0, u_exp.sum(-1))
        w_sum = torch.where(w_max == -infinity, 0.0, w_exp.sum(-1))
        u_log, w_log = u_sum.log(), w_sum.log()
        zero = torch.zeros_like(u_sum)
        forward = reverse = label_logit = zero
        if divergence.needs_forward_kl:
            moment = torch.where(w_exp > 0, w_exp * (w - u), 0.0).sum(-1)
            forward = torch.where(w_sum > 0, moment / w_sum - (w_log - u_log), 0.0)
        if divergence.needs_reverse_kl:
            moment = torch.where(u_exp > 0, u_exp * (u - w), 0.0).sum(-1)
            reverse = torch.where(u_sum > 0, moment / u_sum - (u_log - w_log), 0.0)
        # The logarithm of no mass is minus infinity already.
        student_lse, teacher_lse = u_max + u_log, w_max + w_log
        plain_lse = student_lse
        if spec.temperature != 1.0:
            plain_sum = (student - student_max).exp().sum(-1)
            plain_max = student_max.squeeze(-1)
            plain_lse = plain_max + torch.where(plain_max == -infinity, 0.0, plain_sum).log()
        numbers = ids.to(student.dtype)
        student_first = torch.where(student == student_max, numbers, infinity).amin(-1)
        teacher_first = torch.where(teacher == teacher_max, numbers, infinity).amin(-1)
        if labels is not None:
            label_logit = torch.where(labels == ids, student, 0.0).sum(-1)
        return (
            student_lse, teacher_lse, plain_lse, forward, reverse, u_max, w_max, student_first, teacher_first,
            label_logit,
        )  # fmt: skip

    return statistics


def _probabilities(spec: PointwiseSpec, student: Tensor, teacher: Tensor, student_lse: Tensor, teacher_lse: Tensor):
    """p, q, log p, log q: [w, v] from logits and [w, 1] normalisers."""
    inverse = 1.0 / spec.temperature
    log_q, log_p = student * inverse - student_lse, teacher * inverse - teacher_lse
    return log_p.exp(), log_q.exp(), log_p, log_q


def _row_terms(spec: PointwiseSpec) -> Callable:
    """Build `f(student, teacher, student_lse [w, 1], teacher_lse [w, 1])`; it returns value and row baseline, each
    [w]."""

    terms_of = spec.divergence.terms

    def terms(student: Tensor, teacher: Tensor, student_lse: Tensor, teacher_lse: Tensor) -> tuple[Tensor, Tensor]:
        p, q, log_p, log_q = _probabilities(spec, student, teacher, student_lse, teacher_lse)
        value, baseline = terms_of(p, q, log_p, log_q, spec.beta)
        return value.sum(-1), baseline.sum(-1)

    return terms


def _gradient(spec: PointwiseSpec) -> Callable:
    """Build `f(student, teacher, student_lse, teacher_lse, plain_lse, row_baseline, labels, ids, out)`.

    It writes into `out` [w, v] the gradient of `kd_weight * temperature**2 * KD + ce_weight * CE` with respect to the
    matrix product of the student. Row vectors are [w, 1], `labels` [w, 1] and
    `ids` [1, v], the tokens of the columns, are int32. `out` may be `student` itself.
    """

    gradient_of = spec.divergence.gradient

    def gradient(
        student: Tensor, teacher: Tensor, student_lse: Tensor, teacher_lse: Tensor, plain_lse: Tensor, row_baseline:
            Tensor,
        labels: Tensor | None, ids: Tensor | None, out: Tensor,
    ) -> tuple[()]:  # fmt: skip
        p, q, log_p, log_q = _probabilities(spec, student, teacher, student_lse, teacher_lse)
        result = gradient_of(p, q, log_p, log_q, spec.beta, row_baseline)
        # temperature**2 of the loss, over the temperature that the logits were divided by
        result = result * (spec.kd_weight * spec.temperature)
        if labels is not None:
            plain = q if spec.plain_is_shared else (student - plain_lse).exp()
            result = result + spec.ce_weight * (plain - torch.where(labels == ids, 1.0, 0.0))
        out.copy_(_through_head(result, student, spec))
        return ()

    return gradient


def _through_head(gradient: Tensor, logits: Tensor, spec: PointwiseSpec) -> Tensor:
    """Gradient of the matrix product from that of the student's logits."""
    if spec.student_softcap is not None:
        gradient = gradient * (1.0 - (logits * (1.0 / spec.student_softcap)).square())
    if spec.student_scale != 1.0:
        gradient = gradient * spec.student_scale
    return gradient


def _extra_statistics(spec: PointwiseSpec) -> Callable:
    """Build `f(product [w, v], bias, ids [1, v], labels [w, 1], of_student)`: tempered and plain log-sum-exp, and the
    label's logit where there are labels, over ids that one model lacks; each [w]."""

    def statistics(
        product: Tensor, bias: Tensor | None, ids: Tensor, labels: Tensor | None, of_student: bool
    ) -> tuple[Tensor, ...]:
        scale = spec.student_scale if of_student else spec.teacher_scale
        softcap = spec.student_softcap if of_student else spec.teacher_softcap
        logits = _head_logits(product, bias, scale, softcap)
        tempered, plain = torch.logsumexp(logits * (1.0 / spec.temperature), -1), torch.logsumexp(logits, -1)
        if labels is None or not of_student:
            return tempered, plain, torch.zeros_like(plain)
        return tempered, plain, torch.where(labels == ids, logits, 0.0).sum(-1)

    return statistics


def _extra_gradient(spec: PointwiseSpec) -> Callable:
    """Build `f(student, plain_lse, labels, ids, out)`: only cross-entropy reaches ids that the teacher lacks."""

    def gradient(student: Tensor, plain_lse: Tensor, labels: Tensor, ids: Tensor, out: Tensor) -> tuple[()]:
        result = spec.ce_weight * ((student - plain_lse).exp() - torch.where(labels == ids, 1.0, 0.0))
        out.copy_(_through_head(result, student, spec))
        return ()

    return gradient
