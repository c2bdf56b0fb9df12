"""A student whose ranks keep one shard of both heads each: rows travel to the heads instead of heads to the rows.

The head (and an embedding tied to it) leaves FSDP and becomes a DTensor cut along the token ids, so the optimizer,
clipping, checkpoints and export see a sharded parameter like any other. In forward, the rows of all ranks of the group
are gathered, each rank computes its part of the vocabulary for all of them, and row statistics are merged inside the
fused loss. The loss hands every rank the whole gradient of all rows, so the gather's backward is a slice.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.func import functional_call

from disaggkd_cli.errors import UserError
from disaggkd_cli.losses import Head, LossOutput, shard_bounds
from disaggkd_cli.losses.arguments import IGNORED_LABEL
from disaggkd_cli.losses.collectives import all_gather, reduce_scatter
from disaggkd_cli.models import head_of
from disaggkd_cli.training.layout import REPLICATE, SHARD, waiting_for


class VocabularyParallel:
    """This rank's shards, and the collectives around one micro-batch.

    Args:
        model: the causal LM; its head, and an embedding tied to it, are cut in place.
        mesh: of all student ranks, `[shard]` or `[replicate, shard]`.
        compute_dtype: what forward and backward compute in.

    Raises:
        UserError: the head's weight is used by modules that cannot work on a shard.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
        self.model = model
        self.group = mesh.get_group(SHARD)
        self.replicas = mesh.get_group(REPLICATE) if mesh.ndim == 2 else None
        self.compute_dtype = compute_dtype
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        head = head_of(model)
        self.start, _ = shard_bounds(head.weight.shape[0], self.ranks, self.rank)
        self.output = model.get_output_embeddings()
        embedding = model.get_input_embeddings()
        tied = embedding is not None and getattr(embedding, "weight", None) is head.weight
        self.embedding = embedding if tied else None
        if tied:
            _verify_lookup(embedding)
        self.parameters = self._cut(head, mesh)
        if tied:
            embedding.forward = self._embed
        self._weight: Tensor | None = None
        self._most_tokens = self._most_rows = 0
        self._rows: list[int] = []

    def _cut(self, head: Head, mesh: DeviceMesh) -> set[nn.Parameter]:
        """Replace the head's parameters by their shards, on the mesh's device, and return them."""
        owners = [self.output, *([self.embedding] if self.embedding is not None else [])]
        for name, module in self.model.named_modules():
            if module not in owners and any(one is head.weight for one in module.parameters(recurse=False)):
                raise UserError(
                    f"loss.vocabulary_parallel: {name} of {type(self.model).__name__} uses the head's weight too, and "
                    "only a plain embedding can do with a shard of it; set loss.vocabulary_parallel=false"
                )
        shards = set()
        for name in ("weight", "bias"):
            whole = getattr(self.output, name, None)
            if whole is None:
                continue
            shard = nn.Parameter(_cut_rows(whole.detach(), mesh), requires_grad=whole.requires_grad)
            for owner in owners:
                if getattr(owner, name, None) is whole:
                    setattr(owner, name, shard)
            shards.add(shard)
        return shards

    def begin(self, tokens: int, rows: int, device: torch.device) -> None:
        """Open one micro-batch of `tokens` (padding counted) and `rows` on this rank, and agree on sizes."""
        own = torch.stack([torch.full((), count, device=device) for count in (tokens, rows)])
        everyone = own.new_empty(2 * self.ranks)
        with waiting_for("the size of each rank's micro-batch"):
            all_gather(everyone, own, self.group)
        # The one place where a GPU is waited for.
        counts = everyone.view(-1, 2).tolist()
        self._rows = [of_rank[1] for of_rank in counts]
        self._most_tokens, self._most_rows = max(of_rank[0] for of_rank in counts), max(self._rows)
        self._weight = self._local(self.output.weight)

    def head(self) -> Head:
        """This rank's shard of the student's head in the compute dtype; gradients reach the shard of the parameter."""
        whole = head_of(self.model)
        bias = None if whole.bias is None else self._local(whole.bias).to(self.compute_dtype)
        return Head(self._weight.to(self.compute_dtype), bias, whole.scale, whole.softcap)

    def gathered(self, rows: Tensor, labels: Tensor, teacher_rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows [R, H_s], labels [R] and teacher's rows [R, H_t] of all ranks; padding has no label."""
        with waiting_for("the rows of the other ranks of its vocabulary-parallel group"):
            return (
                _GatheredRows.apply(rows, self._most_rows, self.group),
                _gathered(labels, self._most_rows, self.group, IGNORED_LABEL),
                _gathered(teacher_rows, self._most_rows, self.group),
            )

    def supervised(self, device: torch.device) -> Tensor:
        """Indices [R'] of the gathered rows that are no padding."""
        most = self._most_rows
        own = [torch.arange(i * most, i * most + n, device=device) for i, n in enumerate(self._rows)]
        return torch.cat(own)

    def own_share(self, out: LossOutput) -> LossOutput:
        """Return what this rank reports of the group's figures, so that the shares of all ranks add up to them."""
        return out if self.rank == 0 else type(out)(*(torch.zeros_like(one.detach()) for one in vars(out).values()))

    def end(self) -> None:
        """Let go of what belongs to the micro-batch."""
        self._weight = None

    def _local(self, parameter: Tensor) -> Tensor:
        local = parameter.to_local()
        return local if self.replicas is None else _SumOfReplicas.apply(local, self.replicas)

    def _embed(self, ids: Tensor) -> Tensor:
        """Look token ids [B, S] up in the embedding that all ranks of the group hold together: [B, S, H]."""
        if self._weight is None:
            raise RuntimeError("a vocabulary-parallel embedding works inside the student module's forward only")
        found = _Lookup.apply(
            self._weight, ids.reshape(-1), self.start, self._most_tokens, self.embedding.padding_idx, self.group,
            self.compute_dtype,
        )  # fmt: skip
        found = found.view(*ids.shape, -1)
        scale = getattr(self.embedding, "embed_scale", None)
        return found if scale is None else found * torch.as_tensor(scale).to(found.device, found.dtype)


def _cut_rows(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a DTensor of [V, …] whose local part is a copy of this rank's rows, on the mesh's device."""
    group = mesh.get_group(SHARD)
    start, stop = shard_bounds(len(whole), dist.get_world_size(group), dist.get_rank(group))
    local = whole[start:stop].clone()
    local = local if whole.is_meta else local.to(mesh.device_type)
    placements = [Shard(0)] if mesh.ndim == 1 else [Replicate(), Shard(0)]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


@torch.no_grad()
def _verify_lookup(embedding: nn.Module) -> None:
    """Prove on other weights that an embedding looks rows up and multiplies them by its `embed_scale`, if it has one.

    Raises:
        UserError: it does anything else.
    """
    plain = isinstance(embedding, nn.Embedding) and embedding.max_norm is None and not embedding.scale_grad_by_freq
    if plain and not embedding.sparse:
        weight = torch.randn(64, embedding.embedding_dim, generator=torch.Generator().manual_seed(0))
        ids, scale, own = torch.arange(len(weight)), getattr(embedding, "embed_scale", 1.0), {"weight": weight}
        if isinstance(scale, Tensor):
            own["embed_scale"] = scale = torch.tensor(3.0)
        if torch.equal(functional_call(embedding, own, (ids,)), F.embedding(ids, weight) * scale):
            return
    raise UserError(
        f"loss.vocabulary_parallel: the head is tied to a {type(embedding).__name__}, which does more than look rows "
        "up, so it cannot work on a shard; set loss.vocabulary_parallel=false"
    )


def _padded(rows: Tensor, most: int, value: float = 0) -> Tensor:
    """Return [most, …], the rest filled with `value`."""
    if len(rows) == most:
        return rows.contiguous()
    padded = rows.new_full((most, *rows.shape[1:]), value)
    padded[: len(rows)] = rows
    return padded


def _gathered(rows: Tensor, most: int, group: dist.ProcessGroup, value: float = 0) -> Tensor:
    """Return the rows of all ranks, [ranks · most, …], each rank's padded to `most`."""
    everyone = rows.new_empty((dist.get_world_size(group) * most, *rows.shape[1:]))
    if most:
        all_gather(everyone, _padded(rows.detach(), most, value), group)
    return everyone


class _GatheredRows(torch.autograd.Function):
    """Gathers rows whose gradient is the whole one on every rank already: backward takes this rank's slice."""

    @staticmethod
    def forward(ctx, rows, most, group):
        ctx.own = slice(dist.get_rank(group) * most, dist.get_rank(group) * most + len(rows))
        return _gathered(rows, most, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        # A copy: a view would keep the rows of all ranks alive through the whole backward pass.
        return gradient[ctx.own].clone(), None, None


class _SumOfReplicas(torch.autograd.Function):
    """A shard that other replicas of the student hold too: their gradients are added up, as HSDP does for the rest."""

    @staticmethod
    def forward(ctx, shard, group):
        ctx.group = group
        return shard.view_as(shard)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Lookup(torch.autograd.Function):
    """Embedding over a group that holds one shard of ids each: [N] ids of this rank to [N, H] in `dtype`.

    Every rank looks the ids of all ranks up in its shard, with zeros for those that others hold, and the sums are
    scattered to whom they belong: exact, since one term of each is not zero. Backward gathers the gradients and adds
    them, in float32, to the shard's rows.
    """

    @staticmethod
    def forward(ctx, shard, ids, start, most, padding_idx, group, dtype):
        everyone = _gathered(ids, most, group, -1)
        mine = (everyone >= start) & (everyone < start + len(shard))
        out = shard.new_zeros((len(everyone), shard.shape[1]), dtype=dtype)
        if len(shard):
            local = (everyone - start).clamp(0, len(shard) - 1)
            out = F.embedding(local, shard).to(dtype).masked_fill_(~mine[:, None], 0)
        own = out.new_empty((most, shard.shape[1]))
        reduce_scatter(own, out, group)
        trained = mine if padding_idx is None else mine & (everyone != padding_idx)
        # Gradients of ids that are not this shard's go to a row past its end, which is dropped.
        ctx.slots = torch.where(trained, everyone - start, len(shard))
        ctx.group, ctx.most, ctx.count, ctx.shape, ctx.dtype = group, most, len(ids), shard.shape, shard.dtype
        return own[: ctx.count]

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        everyone = _gathered(gradient.contiguous(), ctx.most, ctx.group)
        rows = ctx.shape[0]
        sums = torch.ops.aten.embedding_dense_backward(everyone.to(ctx.dtype), ctx.slots, rows + 1, rows, False)
        return sums[:rows], None, None, None, None, None, None
