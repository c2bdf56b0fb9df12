"""A student without weights, and where each of them is to be read: for ranks that only ever keep a shard of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from disaggkd_cli.config import Config
from disaggkd_cli.errors import UserError
from disaggkd_cli.models.attention import set_attention, set_attention_of_checks
from disaggkd_cli.models.head import backbone_of, head_of, verify_split
from disaggkd_cli.models.kernels import choose_kernels_by_device
from disaggkd_cli.models.layers import cannot_be_cut, config_of_layers, kept_layers, names_in_student
from disaggkd_cli.models.load import ModelSource, resolve_source, teacher_source, without_weights
from disaggkd_cli.models.lora import add_adapters, plain_name
from disaggkd_cli.models.packing import verify_packing
from disaggkd_cli.models.parts import Part, inside, read_parts, reads_in_parts, verified, without_values
from disaggkd_cli.models.small import small_random_model


@dataclass(frozen=True)
class Hollow:
    """A causal LM on the device `meta`, in eval mode, and its weights.

    Attributes:
        model: names, shapes, dtypes and settings are those of the loaded model.
        parts: whole tensors by name; every process may read them by itself.
        head_shape: [V, H] of the head, where the model is a backbone.
    """

    model: nn.Module
    parts: Iterator[Part]
    head_shape: tuple[int, int] = (0, 0)


class ReadWhole(Exception):
    """The model must be loaded whole; the message says why."""


def hollow_lm(source: ModelSource, dtype: torch.dtype, key: str) -> Hollow:
    """Return a model of safetensors files without its weights.

    Raises:
        UserError: it cannot be read.
        ReadWhole: its files allow no reading in parts.
    """
    model = _readable(source, dtype, key)
    return Hollow(model, read_parts(source, model, key))


def _readable(source: ModelSource, dtype: torch.dtype, key: str) -> nn.Module:
    """Return a model without its weights, of files that can be read in parts; raises as `hollow_lm`."""
    if reason := reads_in_parts(source, without_weights(source, dtype, key)):
        raise ReadWhole(reason)
    return without_values(source, dtype, key)


def hollow_backbone(
    source: ModelSource, dtype: torch.dtype, key: str, attention: str, *, packs: bool = False
) -> Hollow:
    """Return the backbone of a model, frozen and without its weights, once its class has been proved.

    Args:
        attention: the kernels that it is to use.
        packs: whether documents share rows.

    Raises:
        UserError: it cannot be read, split or packed; or, when parts are taken, its weights are no trained model's.
        ReadWhole: see `hollow_lm` and `proved_on_small`.
    """
    model = _readable(source, dtype, key)
    set_attention(model, attention, key.replace(".model", ".attention"))
    proved_on_small(model, attention, key, f"{key} {source.name}", packs=packs)
    backbone = backbone_of(model)
    prefix = next(name for name, module in model.named_modules() if module is backbone) + "."
    prefix = "" if prefix == "." else prefix
    parts = verified(
        read_parts(source, model, key, lambda name: name.startswith(prefix)), model, f"{key} {source.name}"
    )
    return Hollow(backbone.requires_grad_(False), inside(parts, prefix), tuple(head_of(model).weight.shape))


def proved_on_small(model: nn.Module, attention: str, key: str, name: str, *, packs: bool = False) -> None:
    """Prove on a small random model of the same class what is else proved on the weights themselves.

    Args:
        model: the causal LM, which may have no weights.
        attention, key: the kernels asked for, and by which config key.
        name: what messages call the model.
        packs: whether documents share rows.

    Raises:
        UserError: its head is not what its configuration says, or documents in a row see each other.
        ReadWhole: no small model of this class can be built.
    """
    try:
        small = small_random_model(model, torch.float32, torch.device("cpu"))
    except UserError as error:
        raise ReadWhole(str(error)) from None
    set_attention_of_checks(small, attention, key, torch.device("cpu"))
    head = head_of(small)
    verify_split(small, head, name)
    if packs:
        verify_packing(backbone_of(small), len(head.weight), name)


def hollow_student(config: Config) -> Hollow:
    """Return the student as `build_student` would, without its weights, which are the same bit for bit.

    Raises:
        UserError: as `build_student`.
        ReadWhole: it is drawn and not read, or its files allow no reading in parts.
    """
    student = config.student
    if student.from_config:
        raise ReadWhole("fresh weights are drawn in one go")
    if student.from_teacher is not None:
        hollow = _of_teacher(teacher_source(config), student.from_teacher.layers)
    else:
        source = resolve_source(student.model, trust_remote_code=student.trust_remote_code)
        hollow = hollow_lm(source, torch.float32, "student.model")
    return hollow if student.lora is None else _with_adapters(hollow, config)


def _of_teacher(source: ModelSource, layers: str | list[int]) -> Hollow:
    teacher = _readable(source, torch.float32, "teacher.model")
    kept = kept_layers(teacher, layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of_layers(teacher, kept), dtype=torch.float32)
    model.generation_config = teacher.generation_config
    names = names_in_student(teacher, kept)
    theirs, mine = teacher.state_dict(), model.state_dict()
    here = {own: tuple(theirs[name].shape) for name, own in names.items()}
    if here != (wanted := {name: tuple(tensor.shape) for name, tensor in mine.items()}):
        name = min(name for name in here.keys() | wanted.keys() if here.get(name) != wanted.get(name))
        raise cannot_be_cut(teacher, kept, f"{name}: {here.get(name)} in the teacher, {wanted.get(name)} by its own")

    def parts() -> Iterator[Part]:
        for part in read_parts(source, teacher, "teacher.model", names.__contains__):
            own = names_in_student(teacher, kept, part)
            yield {own[name]: tensor for name, tensor in part.items() if name in own}

    return Hollow(choose_kernels_by_device(model.eval()), parts())


def _with_adapters(hollow: Hollow, config: Config) -> Hollow:
    """Put the adapters in, whose first weights are drawn here as they would be beside a whole model's."""
    model = hollow.model
    for module in model.modules():  # peft draws on the CPU only where the matrices lie there; these take no memory
        for name, parameter in module._parameters.items():
            if parameter is not None:
                stand_in = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                module._parameters[name] = nn.Parameter(stand_in, requires_grad=parameter.requires_grad)
    model.tie_weights()
    add_adapters(model, config.student.lora, config.seed)
    own = {plain_name(name): name for name in [*model.state_dict(), *dict(model.named_buffers())]}
    drawn = {name: one.detach().clone() for name, one in model.named_parameters() if "lora_" in name}

    def parts() -> Iterator[Part]:
        yield drawn
        for part in hollow.parts:
            yield {own.get(name, name): tensor for name, tensor in part.items()}

    _to_meta(model)
    return Hollow(model.eval(), parts())


def _to_meta(model: nn.Module) -> None:
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, one in module._parameters.items():
            if one is not None:
                empty = nn.Parameter(torch.empty(one.shape, dtype=one.dtype, device="meta"), one.requires_grad)
                module._parameters[name] = moved.setdefault(id(one), empty)
