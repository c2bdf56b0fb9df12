"""A run of consecutive decoder layers of a backbone: one stage of a pipeline, on transformers' own code.

The backbone stays as it is, but for the modules that other stages hold: their layers pass their input through, the
embeddings stand aside on all stages but the first, the last norm on all but the last. The first own layer takes the
states that came from the stage before in place of its input (not `inputs_embeds`, which some models scale), and what
the last own layer returns goes to the stage after. So each layer runs the very code and kernels of one rank.

Whether a class can be cut so is not known from its name but proved, on a small random model of it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from disaggkd_cli.errors import UserError
from disaggkd_cli.models.attention import set_attention
from disaggkd_cli.models.documents import Documents
from disaggkd_cli.models.head import backbone_of, head_of, hidden_states, verify_split
from disaggkd_cli.models.layers import decoder_layers
from disaggkd_cli.models.small import small_random_model

_PROOF_STAGES = 3
_TENSOR = 0
"""What a layer returns where that is no tuple."""


@dataclass(frozen=True)
class Anatomy:
    """Which modules of a backbone do what, as seen in one forward of a small model of its class.

    Attributes:
        layers: name of the list of decoder layers.
        entry: names of the modules with weights that run before the first layer.
        tail: those that run after the last one.
        idle: those that never run, such as a vision tower.
        returns: length of the tuple that a layer returns; 0 where it returns the hidden states themselves.
        dtype: of the hidden states between layers.
        final_dtype: of the final hidden states.
    """

    layers: str
    entry: tuple[str, ...]
    tail: tuple[str, ...]
    idle: tuple[str, ...]
    returns: int
    dtype: torch.dtype
    final_dtype: torch.dtype


class PassThrough(nn.Module):
    """Stands where another stage's layer is: returns the hidden states that it is given.

    It keeps the layer's plain attributes, by which some models choose a layer's mask or position embeddings.
    """

    def __init__(self, layer: nn.Module, returns: int) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if not name.startswith("_") and (value is None or isinstance(value, (str, int, float, bool))):
                setattr(self, name, value)
        self._returns = returns

    def forward(self, *arguments: Any, **named: Any) -> Any:
        states = arguments[0] if arguments else named["hidden_states"]
        return states if self._returns == _TENSOR else (states, *[None] * (self._returns - 1))


class _Placeholder(nn.Module):
    """Stands where the first stage has embeddings; what it returns has the right shape, and the first own layer
    ignores it."""

    def __init__(self, stage: Stage, weight: Tensor) -> None:
        super().__init__()
        self._stage = (stage,)  # not a submodule
        # Some models ask their embeddings' weight for its device and dtype.
        self.register_buffer("weight", torch.empty(0, dtype=weight.dtype, device=weight.device), persistent=False)

    def forward(self, *arguments: Any, **named: Any) -> Tensor:
        first = next((one for one in (*arguments, *named.values()) if isinstance(one, Tensor)), None)
        return first if first is not None and first.is_floating_point() else self._stage[0].received


class _Unchanged(nn.Module):
    """Stands where the last stage has the norm, and for modules that no text passes through."""

    def forward(self, states: Tensor, *arguments: Any, **named: Any) -> Tensor:
        return states


class Stage:
    """The layers `start … stop - 1` of a backbone, which is changed to hold nothing else.

    Args:
        backbone: a whole one, with weights or without; in eval mode.
        anatomy: of its class.
        start, stop: the layers that stay.

    Attributes:
        backbone: the same, cut.
        received: what came from the stage before, while a forward runs.
    """

    def __init__(self, backbone: nn.Module, anatomy: Anatomy, start: int, stop: int) -> None:
        layers = backbone.get_submodule(anatomy.layers)
        self.backbone = backbone
        self.layers = range(start, stop)
        self.first, self.last = start == 0, stop == len(layers)
        self.received: Tensor | None = None
        self._left: Tensor | None = None
        self._layers = layers
        for number in range(len(layers)):
            if number not in self.layers:
                layers[number] = PassThrough(layers[number], anatomy.returns)
        for name in anatomy.idle:
            _replace(backbone, name, _Unchanged())
        if not self.first:
            weight = next(layers[start].parameters())
            for name in anatomy.entry:
                _replace(backbone, name, _Placeholder(self, weight))
            layers[start].register_forward_pre_hook(self._enter, with_kwargs=True)
        if not self.last:
            for name in anatomy.tail:
                _replace(backbone, name, _Unchanged())
            layers[stop - 1].register_forward_hook(self._leave)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        received: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Return what leaves this stage: [B, S, H] between layers, or the final hidden states from the last stage.

        Args:
            input_ids, position_ids: [B, S] int64, as for the whole backbone.
            received: [B, S, H] of the stage before; None on the first stage.
            documents: as for `hidden_states`.
        """
        self.received, self._left = received, None
        try:
            final = hidden_states(self.backbone, input_ids, position_ids, documents)
            return final if self.last else self._left
        finally:
            self.received = self._left = None

    def own_layers(self) -> list[nn.Module]:
        """Return the layers that this stage holds, in order."""
        return [self._layers[number] for number in self.layers]

    def _enter(self, layer: nn.Module, arguments: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if arguments:
            return (self.received, *arguments[1:]), named
        return arguments, {**named, "hidden_states": self.received}

    def _leave(self, layer: nn.Module, arguments: tuple, output: Any) -> None:
        self._left = output if isinstance(output, Tensor) else output[0]


def modules_elsewhere(backbone: nn.Module, anatomy: Anatomy, start: int, stop: int) -> list[nn.Module]:
    """Return the modules of a whole backbone that the stage of the layers `start … stop - 1` does not hold."""
    layers = backbone.get_submodule(anatomy.layers)
    names = [*anatomy.idle, *(anatomy.entry if start > 0 else ()), *(anatomy.tail if stop < len(layers) else ())]
    return [*layers[:start], *layers[stop:], *map(backbone.get_submodule, names)]


def _replace(backbone: nn.Module, name: str, module: nn.Module) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(backbone.get_submodule(path), leaf, module)


def anatomy_of(backbone: nn.Module, vocabulary: int) -> Anatomy:
    """Return which modules of a (small) backbone do what, after watching one forward.

    Raises:
        UserError: its layers do not run once each in order, or what they pass on is no tensor [B, S, H].
    """
    name, layers = decoder_layers(backbone)
    order: list[str] = []
    outputs: list[Any] = []
    hooks = []
    numbers = {id(layer): number for number, layer in enumerate(layers)}
    owners = [name.rsplit(".", count)[0] if count <= name.count(".") else "" for count in range(1, name.count(".") + 2)]
    parts = {}
    for owner in owners:
        for child, module in backbone.get_submodule(owner).named_children():
            full = f"{owner}.{child}" if owner else child
            if not (name == full or name.startswith(f"{full}.")) and next(module.parameters(), None) is not None:
                parts[full] = module
    for part, module in parts.items():
        hooks.append(module.register_forward_pre_hook(lambda *_, part=part: order.append(part)))
    for layer in layers:
        hooks.append(
            layer.register_forward_hook(
                lambda layer, _, output: (
                    (order.append(f"layer {numbers[id(layer)]}"), outputs.append(output))[2:] or None
                )
            )
        )
    try:
        ids, positions = _tokens(vocabulary, next(backbone.parameters()).device)
        with torch.no_grad():
            final = hidden_states(backbone, ids, positions)
    finally:
        for hook in hooks:
            hook.remove()
    ran = [one for one in order if one.startswith("layer ")]
    if ran != [f"layer {number}" for number in range(len(layers))]:
        raise UserError("its layers do not run once each, one after the other")
    states = [output if isinstance(output, Tensor) else output[0] for output in outputs]
    if any(not isinstance(one, Tensor) or one.shape != final.shape for one in states):
        raise UserError("what goes from layer to layer is not one tensor of hidden states")
    first, last = order.index(ran[0]), order.index(ran[-1])
    return Anatomy(
        layers=name,
        entry=tuple(part for part in parts if part in order[:first] and part not in order[first:]),
        tail=tuple(part for part in parts if part in order[last:] and part not in order[:last]),
        idle=tuple(part for part in parts if part not in order),
        returns=_TENSOR if isinstance(outputs[0], Tensor) else len(outputs[0]),
        dtype=states[0].dtype,
        final_dtype=final.dtype,
    )


def _tokens(vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two rows of random ids; the second holds two documents."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, vocabulary, (2, 24), generator=generator)
    positions = torch.stack([torch.arange(24), torch.cat([torch.arange(10), torch.arange(14)])])
    return ids.to(device), positions.to(device)


def prove_stages(model: nn.Module, dtype: torch.dtype, device: torch.device, attention: str, name: str) -> Anatomy:
    """Prove on a small random model of `model`'s class that stages give the bits of the whole; return its anatomy.

    Its head is verified too, since no stage holds the real one.

    Args:
        model: the causal LM; it may have no weights.
        dtype, device, attention: those of the run.
        name: of the teacher, for messages.

    Raises:
        UserError: the class cannot be cut into stages, with the reason.
    """
    refusal = f"teacher.parallelism: {name} ({type(model).__name__}) cannot be cut into stages: "
    mend = "; use fsdp, or teacher.ranks_per_replica=1"
    try:
        small = small_random_model(model, dtype, device)
        set_attention(small, attention, "teacher.attention")
        verify_split(small, head_of(small), "a small one")
        return prove_on(small)
    except UserError as error:
        raise UserError(f"{refusal}{error}{mend}") from None


@torch.no_grad()
def prove_on(small: nn.Module) -> Anatomy:
    """Compare the staged forward of a small model with its whole one, bit for bit, and return its anatomy.

    Raises:
        UserError: they differ, or one of them cannot be computed.
    """
    backbone = backbone_of(small)
    untouched = copy.deepcopy(backbone)  # what a forward leaves on modules must not reach the stages by this way
    vocabulary = small.get_output_embeddings().weight.shape[0]
    try:
        anatomy = anatomy_of(backbone, vocabulary)
        ids, positions = _tokens(vocabulary, next(backbone.parameters()).device)
        whole = hidden_states(backbone, ids, positions)
        count = len(backbone.get_submodule(anatomy.layers))
        cuts = sorted({round(count * part / _PROOF_STAGES) for part in range(_PROOF_STAGES + 1)})
        states = None
        for start, stop in zip(cuts, cuts[1:], strict=False):
            stage = Stage(copy.deepcopy(untouched), anatomy, start, stop)
            states = stage.forward(ids, positions, states)
    except UserError:
        raise
    except Exception as error:  # code of any class, in which modules stand aside that it may not be able to miss
        raise UserError(f"the staged forward of a small one fails ({type(error).__name__}: {error})") from None
    if not bool(torch.isfinite(whole).all()):
        raise UserError("a small random one computes states that are not finite, so nothing can be proved on it")
    if not torch.equal(states, whole):
        worst = ((states.double() - whole.double()).norm() / whole.double().norm()).item()
        raise UserError(
            "its layers hand on more than the hidden states: the staged forward of a small one differs from the whole "
            f"one by {worst:.2g} of its size"
        )
    return anatomy
