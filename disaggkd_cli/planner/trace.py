"""One student step on fake tensors under FSDP's memory tracker. The only file of the planner that imports torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import transformers.masking_utils
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from disaggkd_cli.losses import Head, reference_kd_loss
from disaggkd_cli.models import backbone_of, head_of, hidden_states
from disaggkd_cli.planner.memory.heads import loss_work
from disaggkd_cli.planner.workload import Workload
from disaggkd_cli.training.student_module import shard_student

_TORCH_DTYPES = {2: torch.bfloat16, 4: torch.float32}


def trace_student(work: Workload, fields: dict[str, Any]) -> dict[str, float]:
    """Return bytes by the tracker's categories at the peak of a step in steady state (the second one).

    Args:
        fields: the student's config.json; its depth is set to that of `work`.
    """
    with _fake_world(work.student_ranks) as mesh, _documents(work.packed), FakeTensorMode():
        # The first pass warms DTensor's sharding propagation, whose own fake tensors the tracker books as optimizer
        # state.
        _trace(work, fields, mesh)
        return _trace(work, fields, mesh)


def _trace(work: Workload, fields: dict[str, Any], mesh: DeviceMesh) -> dict[str, float]:
    module = _Step(_student(work, fields), work).train()
    shard_student(module, mesh, _TORCH_DTYPES[work.student_bytes], "full" if work.checkpointing else "none")
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    rows = work.micro_batch_tokens // work.sequence
    input_ids = torch.zeros(rows, work.sequence, dtype=torch.int64)
    position_ids = torch.arange(work.sequence)[None].expand(rows, work.sequence)
    tracker = FSDPMemTracker(module, optimizer)
    tracker.track_inputs((input_ids, position_ids))
    with tracker:
        for step in range(2):
            module(input_ids, position_ids).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step == 0:
                tracker.reset_mod_stats()
    snapshot = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return {str(getattr(key, "value", key)): float(value) for key, value in snapshot.items() if str(key) != "Total"}


class _Step(nn.Module):
    """The trainer's module with every row supervised and no labels, since fake tensors have no values to look at."""

    def __init__(self, model: nn.Module, work: Workload) -> None:
        super().__init__()
        self.model = model
        self.work = work
        dtype = _TORCH_DTYPES[work.teacher_bytes]
        self.teacher = (
            torch.empty(work.micro_batch_tokens, work.teacher.hidden, dtype=dtype),
            Head(torch.empty(work.teacher.vocabulary, work.teacher.hidden, dtype=dtype)),
        )

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        work = self.work
        states = hidden_states(backbone_of(self.model), input_ids, position_ids)
        student_hidden = states.reshape(-1, states.shape[-1])[torch.arange(work.micro_batch_tokens)]
        arguments = {"divergence": work.divergence, "num_tokens": work.micro_batch_tokens}
        heads = (head_of(self.model), self.teacher[1])
        if work.implementation == "full":
            return reference_kd_loss(student_hidden, heads[0], self.teacher[0], heads[1], None, **arguments).loss
        return _FusedStandIn.apply(student_hidden, heads[0].weight, round(loss_work(work).scratch.value))


class _FusedStandIn(torch.autograd.Function):
    """Allocates what the fused loss allocates: scratch that is gone when it returns, dH, and dW in float32.

    The loss itself passes over thousands of tiles, which fake tensors make slow and which hold no more than the
    scratch.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, scratch_bytes: int) -> Tensor:
        ctx.gradients = (torch.empty_like(hidden), torch.empty(weight.shape, dtype=torch.float32))
        ctx.dtype = weight.dtype
        scratch = torch.empty(scratch_bytes, dtype=torch.uint8)
        del scratch
        return hidden.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight = ctx.gradients
        ctx.gradients = None
        if weight.dtype != ctx.dtype:
            weight = torch.mul(weight, 1.0, out=torch.empty_like(weight, dtype=ctx.dtype))
        return hidden, weight, None


def _student(work: Workload, fields: dict[str, Any]) -> nn.Module:
    fields = dict(fields.get("text_config") or fields)
    fields["num_hidden_layers"] = len(work.student.layers)
    if fields.get("layer_types"):
        fields["layer_types"] = fields["layer_types"][: len(work.student.layers)]
    fields["tie_word_embeddings"] = work.student.tied
    model_type = fields.pop("model_type")
    for key in ("dtype", "torch_dtype", "architectures"):
        fields.pop(key, None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields), dtype=torch.float32)
    if any(hasattr(module, "gate_up_proj") for module in model.modules()):
        model.set_experts_implementation("grouped_mm")
    if work.student_attention != "auto":
        model.set_attn_implementation(work.student_attention)
    return model


@contextlib.contextmanager
def _fake_world(ranks: int) -> Iterator[DeviceMesh]:
    if dist.is_initialized():
        raise RuntimeError("tracing needs a process of its own: a process group is initialised already")
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _documents(packed: bool) -> Iterator[None]:
    """Fake position ids have no values: transformers then always builds the mask of packed rows, unless told that
    there are none."""
    if packed:
        yield
        return
    original = transformers.masking_utils.find_packed_sequence_indices
    transformers.masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        transformers.masking_utils.find_packed_sequence_indices = original
