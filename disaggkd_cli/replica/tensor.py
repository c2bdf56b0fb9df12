"""A teacher spread over the ranks of its replica by tensor parallelism, as transformers' own plan for its class says.

Each rank reads its slices of the weights only. Sums of partial products round differently from one rank's, so hidden
states agree with one rank's to rounding, not to the last bit.
"""

from __future__ import annotations

import os
from dataclasses import fields, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from disaggkd_cli.config import Config
from disaggkd_cli.errors import UserError
from disaggkd_cli.layouts import Layout, facts_of, require
from disaggkd_cli.models import (
    backbone_of,
    head_of,
    load_config,
    set_attention,
    teacher_source,
    verify_split,
)
from disaggkd_cli.models.load import DTYPES, ModelSource, load_causal_lm
from disaggkd_cli.models.verified import VerifiedTeacher, verify_packed_documents


def load_tensor_parallel_teacher(config: Config, device: torch.device, group: dist.ProcessGroup) -> VerifiedTeacher:
    """Return the teacher with this rank's slices of its backbone on `device`. Collective over all ranks of the process.

    Raises:
        UserError: the model has no plan, cannot be divided so, or cannot be read, split or packed.
    """
    source = teacher_source(config)
    _require_plan(source, dist.get_world_size(group))
    here = torch._C._get_accelerator().type
    if here != device.type:
        raise UserError(
            f"teacher.parallelism: tensor computes on this machine's {here} devices, but launch.device={device.type}; "
            "set launch.device=auto, or teacher.parallelism=fsdp"
        )
    if device.index is not None:
        os.environ["LOCAL_RANK"] = str(device.index)  # where transformers looks for the device of this rank
    model = load_causal_lm(
        source,
        DTYPES[config.teacher.dtype],
        "teacher.model",
        distributed_config=DistributedConfig(tp_size=dist.get_world_size(group)),
    )
    set_attention(model, config.teacher.attention, "teacher.attention")
    _limit_waits(model, timedelta(seconds=2 * config.transport.timeout))
    head = head_of(model)
    weight, bias = _whole(head.weight), None if head.bias is None else _whole(head.bias)
    verify_split(model, replace(head, weight=weight, bias=bias), f"teacher.model {source.name}")
    teacher = VerifiedTeacher(source, backbone_of(model), *weight.shape)
    del model, head, weight, bias
    verify_packed_documents(config, teacher)
    return teacher


def _require_plan(source: ModelSource, ranks: int) -> None:
    if "tp_size" not in {field.name for field in fields(DistributedConfig)}:
        raise UserError("teacher.parallelism: tensor needs transformers 5.17 or newer; upgrade it, or use fsdp")
    facts = facts_of(load_config(source, "teacher.model").to_dict(), source.name, gguf=source.gguf_file is not None)
    require(Layout("tensor", ranks), facts)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _limit_waits(model: torch.nn.Module, limit: timedelta) -> None:
    """Groups that transformers makes wait for half an hour unless told otherwise."""
    groups = {
        group
        for parameter in model.parameters()
        if isinstance(parameter, DTensor)
        for group in parameter.device_mesh.get_all_groups()
    }
    for group in groups:
        _set_pg_timeout(limit, group)
