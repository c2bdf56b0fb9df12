"""Split a causal LM into its backbone and its head, and prove the split on the model's own logits.

Logits are not always `hidden @ weight.T`: some families scale them or cap them softly. What the head does is read from
the model's configuration and then checked against what the model itself computes, so an unknown variant is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from disaggkd_cli.errors import UserError
from disaggkd_cli.losses import Head
from disaggkd_cli.models.attention import document_boundaries
from disaggkd_cli.models.documents import Documents, documents_known
from disaggkd_cli.models.values import verify_logits


def backbone_of(model: nn.Module) -> nn.Module:
    """Return the part of a causal LM that ends in the final hidden states, after the last norm."""
    backbone = model.base_model
    # Text towers of some multimodal families name their prefix after the whole model; they are then their own base.
    return getattr(model, "model", backbone) if backbone is model else backbone


def hidden_states(
    backbone: nn.Module, input_ids: Tensor, position_ids: Tensor, documents: Documents | None = None
) -> Tensor:
    """Return final hidden states [B, S, H].

    No cache and no attention mask: with restarting `position_ids` transformers then keeps packed documents apart, and
    right padding is invisible to a causal model.

    Args:
        backbone: what `backbone_of` returned.
        input_ids: [B, S] int64.
        position_ids: [B, S] int64, restarting at each document.
        documents: lengths of the documents of each row, where the host knows them; else the GPU is waited for.
    """
    with documents_known(documents):
        bounds = document_boundaries(backbone, position_ids)
        return backbone(input_ids=input_ids, position_ids=position_ids, use_cache=False, **bounds).last_hidden_state


def states_and_router_logits(
    backbone: nn.Module, input_ids: Tensor, position_ids: Tensor, documents: Documents | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return what `hidden_states` does, and the logits [B * S, E] of the router of each layer that has one."""
    with documents_known(documents):
        out = backbone(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, output_router_logits=True,
            **document_boundaries(backbone, position_ids),
        )  # fmt: skip
    return out.last_hidden_state, tuple(out.router_logits)


def head_semantics(config: Any) -> tuple[float, float | None]:
    """Return `(scale, softcap)` of a model's logits: cap(scale · (hidden @ weightᵀ + bias))."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    kind = text.model_type
    scale = 1.0
    if kind.startswith("granite") or kind == "minicpm3":
        scale = 1.0 / text.logits_scaling
    elif kind.startswith("hyperclovax"):
        scale = float(text.logits_scaling)
    elif kind.startswith("cohere"):
        scale = float(text.logit_scale)
    elif kind == "falcon_h1":
        scale = float(text.lm_head_multiplier)
    softcap = getattr(text, "final_logit_softcapping", None)
    return scale, None if softcap is None else float(softcap)


def head_of(model: nn.Module) -> Head:
    """Return the head of a causal LM; it shares the model's own weight [V, H] and bias [V].

    Raises:
        UserError: when the model has no plain linear head.
    """
    output = model.get_output_embeddings()
    if output is None or not isinstance(getattr(output, "weight", None), Tensor) or output.weight.ndim != 2:
        raise UserError(f"{type(model).__name__} has no linear LM head (weight [V, H]), so it cannot be split")
    _refuse_unless_plain(output, type(model).__name__)
    scale, softcap = head_semantics(model.config)
    return Head(output.weight, getattr(output, "bias", None), scale, softcap)


def _refuse_unless_plain(output: nn.Module, name: str) -> None:
    """Refuse adapters by their kind: they start as no change at all, so the model's own logits cannot show them."""
    changed = type(output).forward is not nn.Linear.forward or parametrize.is_parametrized(output)
    if changed or output._forward_hooks or output._forward_pre_hooks or next(output.children(), None) is not None:
        raise UserError(
            f"{name}: its LM head is a {type(output).__name__} and not a plain linear layer (an adapter, quantised or "
            "hooked head); the loss needs the head's own weight: merge the adapter, or leave lm_head out of its targets"
        )


@torch.no_grad()
def verify_split(model: nn.Module, head: Head, name: str, *, tokens: int = 8, fresh: bool = False) -> float:
    """Check `head(backbone(tokens))` against the model's own logits and return the largest relative difference.

    The model is expected in eval mode and is left as it is. `fresh` weights were drawn and not read.

    Raises:
        UserError: when they differ by more than rounding in the model's dtype, naming `name`; or when they are no
            logits that anything could be learnt from (see `verify_logits`).
    """
    device = head.weight.device
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(0, min(head.weight.shape[0], 1000), (1, tokens), generator=generator).to(device)
    position_ids = torch.arange(tokens, device=device)[None]
    own = model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits[0].double()
    verify_logits(model, own, name, fresh=fresh)
    hidden = hidden_states(backbone_of(model), input_ids, position_ids)[0]
    logits = nn.functional.linear(hidden, head.weight, head.bias).double() * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    if own.shape != logits.shape:
        raise UserError(f"{name}: its logits are {tuple(own.shape)}, but its head gives {tuple(logits.shape)}")
    difference = ((own - logits).abs().max() / own.abs().max().clamp_min(1e-12)).item()
    tolerance = 16 * torch.finfo(hidden.dtype).eps
    if not difference <= tolerance:
        raise UserError(
            f"{name}: {type(model).__name__} does something to its logits that is not known here (its head differs "
            f"from its own logits by {difference:.2g} of their size), so distilling it would be wrong"
        )
    return difference
