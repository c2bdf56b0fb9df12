"""Are a model's weights numbers, and do its logits depend on what it reads?"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from disaggkd_cli.errors import UserError

_NAMED = 3
"""How many tensors a message names."""

DAMAGED = "the weights are damaged, or were made by a run that had failed"


@torch.no_grad()
def verify_logits(model: nn.Module, logits: Tensor, name: str, *, fresh: bool = False) -> None:
    """Refuse a model whose logits are not numbers, or are the same for every id.

    Args:
        model: where the logits come from; its weights are searched for the cause.
        logits: [S, V] of S tokens.
        name: what messages call the model.
        fresh: weights were drawn and not read: some families begin with a head of zeros, which training changes.

    Raises:
        UserError: naming the tensors that hold NaN or infinities, or nothing but zeros.
    """
    if not torch.isfinite(logits).all():
        raise UserError(f"{name}: its logits are not finite numbers: {_why_not_finite(model)}")
    if fresh:
        return
    embedding = model.get_input_embeddings()
    if embedding is not None and not _whole(embedding.weight).any():
        raise UserError(
            f"{name}: its embedding {tuple(embedding.weight.shape)} holds nothing but zeros, so it reads every text "
            "alike; its files are not those of a trained model"
        )
    if torch.equal(logits.amax(-1), logits.amin(-1)):
        zeros = [one for one, tensor in model.named_parameters() if tensor.ndim > 1 and not _whole(tensor).any()]
        why = f" ({_some(zeros)} hold nothing but zeros)" if zeros else ""
        raise UserError(
            f"{name}: it gives every id the same logit{why}, so there is nothing to learn from it; its files are not "
            "those of a trained model"
        )


@torch.no_grad()
def verify_weights(module: nn.Module, name: str) -> None:
    """Refuse modules whose weights are not numbers: for parts of a model, which have no logits to tell it by.

    Raises:
        UserError: naming the tensors that hold NaN or infinities.
    """
    bad = _not_finite(module)
    if bad:
        raise UserError(f"{name}: {_some(bad)}; {DAMAGED}")


def verify_head_values(weight: Tensor, name: str, *, whole: bool) -> None:
    """Refuse a head's rows [V, H] that hold NaN or infinities, or where they are the `whole` head, only zeros.

    Raises:
        UserError: naming the head by `name`.
    """
    if not torch.isfinite(weight).all():
        bad = int((~torch.isfinite(weight)).sum())
        raise UserError(f"{name}: {bad:,} of {weight.numel():,} values are NaN or infinite; copy the weights again")
    if whole and weight.numel() and not weight.any():
        raise UserError(f"{name}: holds nothing but zeros; its files are not those of a trained model")


def _not_finite(model: nn.Module) -> list[str]:
    found = []
    for name, tensor in model.named_parameters():
        value = _whole(tensor)
        if value.is_floating_point() and not torch.isfinite(value).all():
            found.append(not_finite(name, value))
    return found


def not_finite(name: str, tensor: Tensor) -> str:
    """Return in words how many values of a tensor are no finite numbers."""
    bad = int((~torch.isfinite(tensor)).sum())
    kind = "NaN" if tensor.isnan().any() else "infinite"
    return f"{name} ({bad:,} of {tensor.numel():,} values are {kind})"


def _why_not_finite(model: nn.Module) -> str:
    found = _not_finite(model)
    if found:
        return f"{_some(found)}; {DAMAGED}"
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return f"all of its weights are, but they overflow when computed in {dtype}; take bfloat16 or float32"


def _some(names: list[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
