"""A teacher's backbone sharded over the ranks of its replica with FSDP: each rank reads its own shards, layer by layer.

The head is read by nobody. From files that cannot be read in parts the leader loads the whole model into its machine's
memory and hands it out, a tensor at a time.
"""

from __future__ import annotations

import contextlib
import json

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from disaggkd_cli.config import Config
from disaggkd_cli.errors import RunError, UserError
from disaggkd_cli.models import backbone_of, set_attention, teacher_source
from disaggkd_cli.models.fill import fill, from_rank_zero
from disaggkd_cli.models.hollow import ReadWhole, hollow_backbone
from disaggkd_cli.models.load import DTYPES, without_weights
from disaggkd_cli.models.verified import VerifiedTeacher, load_verified_teacher, verify_packed_documents
from disaggkd_cli.replica.rounds import LEADER
from disaggkd_cli.training.student_module import shard_teacher


def load_sharded_teacher(config: Config, device: torch.device, group: dist.ProcessGroup) -> VerifiedTeacher:
    """Return the teacher with this rank's shard of its backbone on `device`. Collective over `group`.

    Raises:
        UserError: the model cannot be read, split, packed or sharded.
        RunError: another rank ended meanwhile.
    """
    source = teacher_source(config)
    mesh = DeviceMesh.from_group(group, device.type, mesh=torch.arange(dist.get_world_size(group)))
    with contextlib.suppress(ReadWhole):
        hollow = hollow_backbone(source, DTYPES[config.teacher.dtype], "teacher.model", config.teacher.attention)
        fill(shard_teacher(hollow.model, mesh), hollow.parts, device)
        return _packing_verified(config, VerifiedTeacher(source, hollow.model, *hollow.head_shape))
    whole = None
    if dist.get_rank(group) == LEADER:
        whole = load_verified_teacher(config, torch.device("cpu"), check_packing=False)
    backbone = _backbone_without_weights(config)
    try:
        contents = _agree_on_contents(backbone, whole, group)
        tensors = iter([_tensors(whole.backbone)]) if whole is not None else None
        parts = from_rank_zero(tensors, backbone, group)
        fill(shard_teacher(backbone, mesh), parts, device)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise RunError(f"the replica's ranks could not share out {config.teacher.model}: {reason}") from error
    return _packing_verified(
        config, VerifiedTeacher(source, backbone, contents["vocabulary_size"], contents["hidden_size"])
    )


def _packing_verified(config: Config, teacher: VerifiedTeacher) -> VerifiedTeacher:
    verify_packed_documents(config, teacher)
    return teacher


def _backbone_without_weights(config: Config) -> nn.Module:
    source = teacher_source(config)
    model = without_weights(source, DTYPES[config.teacher.dtype], "teacher.model")
    set_attention(model, config.teacher.attention, "teacher.attention")
    backbone = backbone_of(model)
    if len(list(backbone.named_parameters())) != len(list(backbone.named_parameters(remove_duplicate=False))):
        raise UserError(
            f"teacher.parallelism: layers of {source.name} share parameters, which fsdp cannot shard; "
            "set teacher.ranks_per_replica=1"
        )
    return backbone


def _agree_on_contents(backbone: nn.Module, whole: VerifiedTeacher | None, group: dist.ProcessGroup) -> dict:
    """Return the leader's sizes and its list of `[name, shape, dtype]`, and give `backbone` the same dtypes."""
    contents = {}
    if whole is not None:
        tensors = [
            [name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
            for name, tensor in _tensors(whole.backbone).items()
        ]
        contents = {
            "vocabulary_size": whole.vocabulary_size,
            "hidden_size": whole.hidden_size,
            "tensors": tensors,
        }
    contents = json.loads(_broadcast_text(json.dumps(contents), group))
    mine = {name: list(tensor.shape) for name, tensor in _tensors(backbone).items()}
    theirs = {name: shape for name, shape, _ in contents["tensors"]}
    if mine != theirs:
        differing = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
        raise UserError(
            f"teacher.parallelism: the model as its configuration describes it differs from what its files hold (at "
            f"{differing[0]}), so it cannot be sharded; set teacher.ranks_per_replica=1"
        )
    for name, shape, dtype in contents["tensors"]:
        owner, leaf = _owner(backbone, name)
        empty = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        if leaf in owner._parameters:
            owner._parameters[leaf] = nn.Parameter(empty, requires_grad=False)
        else:
            owner._buffers[leaf] = empty
    return contents


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


def _broadcast_text(text: str, group: dist.ProcessGroup) -> str:
    """Return the leader's text on every rank: its size first, then its bytes."""
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    size = torch.tensor([data.numel()])
    dist.broadcast(size, LEADER, group=group)
    if dist.get_rank(group) != LEADER:
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, LEADER, group=group)
    return data.numpy().tobytes().decode()
