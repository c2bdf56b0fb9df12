"""Losses of other projects, called as their own trainers call them. `pip install 'disaggkd[peers]'` brings them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Peer:
    """Another project's loss.

    Attributes:
        name: in the table.
        module: what must be importable.
        divergences: those of ours that it has; empty for any.
        cross_entropy: it computes cross-entropy alone.
        build: makes `f(inputs) -> loss` from the imported module and a divergence.
    """

    name: str
    module: str
    divergences: tuple[str, ...]
    cross_entropy: bool
    build: Callable

    def load(self, divergence: str, device: torch.device) -> tuple[str, Callable | None]:
        """Return a reason and None, or an empty reason and the loss."""
        if self.divergences and divergence not in self.divergences:
            return f"has no {divergence}", None
        package = self.module.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            return "not installed; pip install 'disaggkd[peers]'", None
        try:
            module = importlib.import_module(self.module)
            return "", self.build(module, divergence, device)
        except (ImportError, AttributeError, RuntimeError) as error:
            return f"installed, but can't run here: {error}", None


# Both projects' beta weighs the teacher; 0 and 1 are special-cased to the pure KLs.
_BETA = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}


def _liger(chunk: int) -> Callable:
    def build(module, divergence: str, device: torch.device) -> Callable:
        loss = module.LigerFusedLinearJSDLoss(
            weight_hard_loss=0.0, weight_soft_loss=1.0, beta=_BETA[divergence], compiled=True, chunk_size=chunk
        )

        def call(inputs) -> Tensor:
            return loss(
                inputs.student_hidden,
                inputs.student_weight,
                inputs.teacher_hidden,
                inputs.teacher_weight,
                inputs.labels,
            )

        return call

    return build


def _trl(module, divergence: str, device: torch.device) -> Callable:
    def call(inputs) -> Tensor:
        per_token, _ = module.ChunkedDivergenceFunction.apply(
            inputs.student_hidden, inputs.student_weight, None, inputs.teacher_hidden, inputs.teacher_weight, None,
            _BETA[divergence], 1.0,
        )  # fmt: skip
        return per_token.mean()

    return call


def _torch_cross_entropy(module, divergence: str, device: torch.device) -> Callable:
    options = module.LinearCrossEntropyOptions()

    def call(inputs) -> Tensor:
        return module.functional.linear_cross_entropy(
            inputs.student_hidden, inputs.student_weight, inputs.labels, options=options
        )

    return call


PEERS = (
    Peer("liger_chunked_1024", "liger_kernel.chunked_loss", tuple(_BETA), False, _liger(1024)),
    Peer("liger_chunked_256", "liger_kernel.chunked_loss", tuple(_BETA), False, _liger(256)),
    Peer("trl_chunked", "trl.kernels.chunked_divergence", tuple(_BETA), False, _trl),
    Peer("torch_linear_cross_entropy", "torch.nn", (), True, _torch_cross_entropy),
)
