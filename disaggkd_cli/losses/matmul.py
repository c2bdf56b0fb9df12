"""The matrix products of the fused loss: operands in the inputs' dtype where the hardware multiplies it with fp32
results.

CUDA multiplies bf16 (and fp16) with results in fp32; this is probed once for each device, and where it fails operands
are converted tile by tile. CPUs round the results of bf16 products to bf16, so there the operands are converted:
exact, and as fast as fp32. Not run on a GPU so far.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from disaggkd_cli.losses.device_costs import device_key

_LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Precision:
    """Dtypes of the products of one side.

    Attributes:
        rounding: dtype that operands are rounded to first, as autocast would; None outside autocast.
        operand: dtype that the logits' product takes.
        gradient: dtype that the gradients' products take.
        result: dtype of logits and accumulators; float32, or float64 where an input is.
    """

    rounding: torch.dtype | None
    operand: torch.dtype
    gradient: torch.dtype
    result: torch.dtype

    def copy_bytes(self, hidden: Tensor, weight: Tensor) -> int:
        """Bytes per element of the converted copies that the products need; 0 where they need none."""
        wanted = {self.operand, self.gradient}
        if self.rounding in (None, self.operand) and wanted == {hidden.dtype} == {weight.dtype}:
            return 0
        copies = wanted | ({self.rounding} if self.rounding else set())
        return sum(dtype.itemsize for dtype in copies)


def choose_precision(hidden: Tensor, weight: Tensor, result: torch.dtype) -> Precision:
    """Return the dtypes of the products of one side, `hidden` [R, H] with `weight` [V, H], for results in `result`."""
    device = hidden.device
    operand = torch.promote_types(hidden.dtype, weight.dtype)
    rounding = None
    if torch.is_autocast_enabled(device.type) and torch.float64 not in (hidden.dtype, weight.dtype):
        operand = rounding = torch.get_autocast_dtype(device.type)
    mixed = operand in _LOW_PRECISION and result == torch.float32 and _multiplies_into_fp32(device, operand)
    # Gradients of fp16 tiles underflow; bf16 keeps fp32's range.
    gradient = operand if mixed and operand is torch.bfloat16 else result
    return Precision(rounding, operand if mixed else result, gradient, result)


def cost_model(device: torch.device) -> str:
    """Return the key of `device_costs.DEVICES` for a device."""
    if device.type != "cuda":
        return "cpu"
    return _cost_model_of_gpu(device)


@functools.cache
def _cost_model_of_gpu(device: torch.device) -> str:
    return device_key(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


def needs_sum_buffer(device: torch.device, precision: Precision) -> bool:
    """Return whether products of gradient tiles pass through a buffer before they are added to wider sums."""
    return precision.gradient != precision.result and not _adds_into_fp32(device, precision.gradient)


def result_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype of logits: float64 where any tensor is, else float32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def converted(tensor: Tensor, rounding: torch.dtype | None, dtype: torch.dtype) -> Tensor:
    """Return `tensor` in `dtype`, rounded to `rounding` before; itself where nothing changes."""
    return (tensor if rounding is None else tensor.to(rounding)).to(dtype)


def product_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """`out = left @ right`; `out` may be wider than the operands."""
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    else:
        torch.ops.aten.mm.dtype_out(left, right, out.dtype, out=out)


def add_product(out: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """`out += left @ right`, or `out = left @ right` when `first`; `out` may be wider than the operands."""
    if first:
        product_into(out, left, right)
    elif out.dtype == left.dtype:
        out.addmm_(left, right)
    elif _adds_into_fp32(out.device, left.dtype):
        torch.ops.aten.addmm.dtype_out(out, left, right, out.dtype, out=out)
    else:
        out.add_(torch.ops.aten.mm.dtype(left, right, out.dtype))


@functools.cache
def _multiplies_into_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cuda":
        return False
    left, right = torch.eye(16, device=device, dtype=dtype), torch.full((16, 16), 0.5, device=device, dtype=dtype)
    out = torch.empty(16, 16, device=device)
    try:
        torch.ops.aten.mm.dtype_out(left, right, torch.float32, out=out)
    except (RuntimeError, NotImplementedError):
        return False
    return bool((out == 0.5).all())


@functools.cache
def _adds_into_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    left, right = torch.eye(16, device=device, dtype=dtype), torch.full((16, 16), 0.5, device=device, dtype=dtype)
    out = torch.ones(16, 16, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(out, left, right, torch.float32, out=out)
    except (RuntimeError, NotImplementedError):
        return False
    return bool((out == 1.5).all())
