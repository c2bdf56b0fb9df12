"""Load one stage of a teacher: transformers' own loader on a model that has this stage's modules only.

Weights of other stages have no parameter to go to, so the loader leaves them in their files: they touch neither host
memory nor a GPU, however many files there are and however their tensors are named.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from disaggkd_cli.models.attention import set_attention
from disaggkd_cli.models.head import backbone_of
from disaggkd_cli.models.load import ModelSource, load_causal_lm
from disaggkd_cli.models.stages import Anatomy, Stage, modules_elsewhere

_MEASUREMENTS = 3
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")


def load_stage(
    source: ModelSource, model: nn.Module, anatomy: Anatomy, layers: tuple[int, int], attention: str
) -> Stage:
    """Return the stage of `source` that holds the layers `start … stop - 1`, on the CPU.

    Args:
        source: a directory or hub name with safetensors files.
        model: the whole causal LM without weights, in the dtype to load.
        anatomy: of its class.
        layers: `(start, stop)`.
        attention: `teacher.attention`.

    Raises:
        UserError: the model cannot be read, or weights of this stage are missing from its files.
    """
    whole = type(model)

    class OneStage(whole):
        def __init__(self, config: Any, *arguments: Any, **named: Any) -> None:
            super().__init__(config, *arguments, **named)
            for module in modules_elsewhere(backbone_of(self), anatomy, *layers):
                _empty(module)
            _empty(self.get_output_embeddings())
            self.all_tied_weights_keys = {}

    # The loader looks a class's renamings up by these.
    OneStage.__name__, OneStage.__qualname__, OneStage.__module__ = (
        whole.__name__,
        whole.__qualname__,
        whole.__module__,
    )
    loaded = load_causal_lm(
        source,
        next(model.parameters()).dtype,
        "teacher.model",
        model_class=OneStage,
        elsewhere=model.state_dict().keys(),
        config=model.config,
    )
    set_attention(loaded, attention, "teacher.attention")
    backbone = backbone_of(loaded).requires_grad_(False)
    return Stage(backbone, anatomy, *layers)


def _empty(module: nn.Module) -> None:
    """Take a module's weights away, so that the loader has nothing to read for it. Its submodules stay in place with
    what no file holds: some models reach into all their layers when they compute that."""
    for part in module.modules():
        part._is_hf_initialized = True
        for name in part._parameters:
            part._parameters[name] = None
        for name in part._buffers:
            if name not in part._non_persistent_buffers_set:
                part._buffers[name] = None


def layer_costs(model: nn.Module, anatomy: Anatomy) -> list[float]:
    """Return for each layer how many parameters a token is multiplied with: of experts, those that it is routed to."""
    text = model.config.get_text_config()
    every = next((getattr(text, name) for name in _EXPERTS if getattr(text, name, None)), 0)
    active = next((getattr(text, name) for name in _ACTIVE_EXPERTS if getattr(text, name, None)), every)
    share = active / every if every and isinstance(active, int) else 1.0
    return [
        sum(
            parameter.numel() * (share if ".experts." in f".{name}." else 1.0)
            for name, parameter in layer.named_parameters()
        )
        for layer in backbone_of(model).get_submodule(anatomy.layers)
    ]


def layer_bytes(model: nn.Module, anatomy: Anatomy) -> tuple[list[int], int, int]:
    """Return how many bytes of weights each layer has, the modules before the first one, and those after the last."""
    backbone = backbone_of(model)

    def size(module: nn.Module) -> int:
        return sum(parameter.nbytes for parameter in module.parameters())

    before, after = (
        sum(size(backbone.get_submodule(name)) for name in names) for names in (anatomy.entry, anatomy.tail)
    )
    return [size(layer) for layer in backbone.get_submodule(anatomy.layers)], before, after


@torch.no_grad()
def layer_seconds(
    stage: Stage, batch: int, sequence: int, width: int, vocabulary: int, dtype: torch.dtype
) -> list[float]:
    """Return how long each layer of a stage takes for a batch of [batch, sequence] tokens: the median of three runs.

    Args:
        width, vocabulary: H_t of the random states that stand for those of the stage before, and V_t of the ids.
        dtype: of these states.
    """
    device = next(stage.backbone.parameters()).device
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (batch, sequence), generator=generator).to(device)
    positions = torch.arange(sequence, device=device).expand(batch, sequence)
    received = None if stage.first else torch.randn(batch, sequence, width, generator=generator).to(device, dtype)
    begun: list[float] = []
    taken: list[list[float]] = []

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def before(*_: Any) -> None:
        begun.append(now())

    def after(*_: Any) -> None:
        taken[-1].append(now() - begun.pop())

    layers = stage.own_layers()
    hooks = [
        hook for one in layers for hook in (one.register_forward_pre_hook(before), one.register_forward_hook(after))
    ]
    try:
        for _ in range(_MEASUREMENTS + 1):
            taken.append([])
            stage.forward(ids, positions, received)
    finally:
        for hook in hooks:
            hook.remove()
    return [_median([run[number] for run in taken[1:]]) for number in range(len(layers))]


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def stage_bytes(stage: Stage) -> int:
    """Return how much memory the weights and buffers of a stage take."""
    tensors: list[Tensor] = [*stage.backbone.parameters(), *stage.backbone.buffers()]
    return sum(tensor.nbytes for tensor in tensors)
