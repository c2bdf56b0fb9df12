"""The student as one module whose forward is backbone, head and loss, sharded with FSDP2.

FSDP shows a whole weight only inside the forward of the module that owns it, so the loss is computed there: the head's
weight is gathered once with the root's other parameters, and never once per window of the loss.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from disaggkd_cli.config import LossConfig
from disaggkd_cli.config.by_device import AUTO
from disaggkd_cli.data import MicroBatch
from disaggkd_cli.errors import UserError
from disaggkd_cli.losses import Head, LossOutput, fused_kd_loss, reference_kd_loss
from disaggkd_cli.losses.arguments import LossArgumentError
from disaggkd_cli.losses.heads import apply_head
from disaggkd_cli.losses.hidden import fresh_projection, hidden_loss
from disaggkd_cli.losses.hidden_names import COSINE
from disaggkd_cli.models import (
    RouterLoss,
    backbone_of,
    decoder_layers,
    head_of,
    hidden_states,
    states_and_router_logits,
)
from disaggkd_cli.training.vocabulary_parallel import VocabularyParallel
from disaggkd_cli.units import parse_bytes


@dataclass(frozen=True)
class StudentOutput(LossOutput):
    """What a micro-batch comes to: the loss's figures, and those of the student module itself. All add up over ranks.

    Attributes:
        teacher_ce: the teacher's own cross-entropy at temperature 1, divided like the student's; zero unless it was
            asked for. Detached.
        router_aux: the load-balancing loss of the routers, without its weight, divided by the micro-batches of the
            step over all ranks; zero without one. Detached.
        hidden: the loss of the hidden states, without its weight; zero without one. Detached.
        written_kd: the part of `kd` that stands in what the student wrote; zero without such rows. Detached.
    """

    teacher_ce: Tensor
    router_aux: Tensor
    written_kd: Tensor
    hidden: Tensor


class StudentModule(nn.Module):
    """A causal LM and the distillation loss over it.

    Args:
        model: the student, a transformers causal LM.
        teacher_head: the teacher's frozen head, or this rank's shard of it when vocabulary-parallel; kept outside the
            module's parameters, so it is neither sharded, trained nor saved.
        loss: the loss section of the config.
        router: the load-balancing loss that is added in training, where the student has routers.
        micro_batches: of one optimizer step over all ranks, whose router losses are averaged.
        seed: of the projection of hidden states, which is the module's own and no part of `model`, where the config
            wants a loss of them.
    """

    def __init__(
        self,
        model: nn.Module,
        teacher_head: Head,
        loss: LossConfig,
        router: RouterLoss | None = None,
        micro_batches: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.router = router
        self.micro_batches = micro_batches
        self._teacher_head = (teacher_head,)
        self.vocabulary: VocabularyParallel | None = None
        self.projection: nn.Parameter | None = None
        if loss.hidden_weight:
            widths = head_of(model).weight.shape[1], teacher_head.weight.shape[1]
            self.projection = nn.Parameter(fresh_projection(*widths, seed))

    @property
    def teacher_head(self) -> Head:
        """The teacher's frozen head, or this rank's shard of it."""
        return self._teacher_head[0]

    def forward(self, batch: MicroBatch, teacher_hidden: Tensor | None, num_tokens: int, evaluation: bool = False):
        """Return `(loss, out)` of one micro-batch, where `out` is a StudentOutput.

        The loss stands beside its dataclass as a tensor of its own because FSDP hooks backward onto the tensors that it
        finds in a forward's result, and does not look into dataclasses.

        Args:
            batch: the micro-batch, on this module's device.
            teacher_hidden: [R, H_t] hidden states of its supervised rows. None: return the likeliest next id after each
                supervised row instead, [R] int64, which needs heads that are not in shards.
            num_tokens: supervised rows of the whole optimizer step, over all ranks.
            evaluation: report the cross-entropies of student and teacher too, whatever their weight in training.
        """
        if teacher_hidden is None:
            return self._next_ids(batch)
        self._check_labels(batch)
        vocabulary = self.vocabulary
        if vocabulary is not None:
            vocabulary.begin(batch.input_ids.numel(), len(batch.rows), batch.input_ids.device)
        backbone, share = backbone_of(self.model), None
        if self.router is not None and not evaluation:
            states, routes = states_and_router_logits(
                backbone, batch.input_ids, batch.position_ids, batch.document_lengths
            )
            share = self.router(routes, batch.token_mask) / self.micro_batches
        else:
            states = hidden_states(backbone, batch.input_ids, batch.position_ids, batch.document_lengths)
        rows = own_rows = states.reshape(-1, states.shape[-1])[batch.rows]
        arguments = self._arguments(num_tokens, evaluation)
        teacher_head = self.teacher_head
        # Else a wider format on the wire would make all of the head's products wide; the states were computed so.
        teacher_hidden = own_hidden = teacher_hidden.to(teacher_head.weight.dtype)
        if vocabulary is not None:
            rows, labels, teacher_hidden = vocabulary.gathered(rows, batch.row_labels, teacher_hidden)
            arguments["group"] = vocabulary.group
            out = fused_kd_loss(
                rows, vocabulary.head(), teacher_hidden, teacher_head, labels, **arguments,
                supervised=vocabulary.supervised(rows.device),
            )  # fmt: skip
            teacher = self._teacher_ce(teacher_hidden, labels, arguments) if evaluation else None
            vocabulary.end()
            out, loss = vocabulary.own_share(_output(out, teacher)), out.loss
            return self._with_own(loss, out, share, self._hidden(own_rows, own_hidden, arguments))
        function = fused_kd_loss if self.loss.implementation == "fused" else reference_kd_loss
        if batch.written:
            out = self._by_writer(function, rows, teacher_hidden, batch, arguments)
            return self._with_own(out.loss, out, share, self._hidden(rows, teacher_hidden, arguments))
        out = function(
            rows, head_of(self.model), teacher_hidden, teacher_head, batch.row_labels, **arguments, supervised="all"
        )
        teacher = self._teacher_ce(teacher_hidden, batch.row_labels, arguments) if evaluation else None
        hidden = self._hidden(rows, teacher_hidden, arguments)
        return self._with_own(out.loss, _output(out, teacher), share, hidden)

    def _by_writer(
        self, function: Any, rows: Tensor, teacher_hidden: Tensor, batch: MicroBatch, arguments: dict[str, Any]
    ) -> StudentOutput:
        """Return the loss over rows of data and rows that the student wrote: one normaliser, but cross-entropy counts
        on rows of data only, since the student's own words are no labels."""
        head, parts = head_of(self.model), []
        for which, written in ((batch.given_rows, False), (batch.written_rows, True)):
            if not len(which) and (written or len(batch.written_rows)):
                continue
            chosen = arguments | {"ce_weight": 0.0} if written else arguments
            out = function(
                rows[which], head, teacher_hidden[which], self.teacher_head, batch.row_labels[which], **chosen,
                supervised="all",
            )  # fmt: skip
            out = _output(out, None)
            if written:
                out = replace(out, ce=torch.zeros_like(out.ce), written_kd=out.kd)
            parts.append(out)
        return StudentOutput(**{name: sum(vars(part)[name] for part in parts) for name in vars(parts[0])})

    def _next_ids(self, batch: MicroBatch) -> Tensor:
        states = hidden_states(backbone_of(self.model), batch.input_ids, batch.position_ids, batch.document_lengths)
        head = head_of(self.model)
        rows = states.reshape(-1, states.shape[-1])[batch.rows]
        return apply_head(rows.to(head.weight.dtype), head).argmax(-1)

    def _check_labels(self, batch: MicroBatch) -> None:
        """Raise LossArgumentError for a label beyond the student's vocabulary, which the loss could not name unless it
        waited for the GPU."""
        ids = head_of(self.model).weight.shape[0]
        if batch.largest_label >= ids:
            raise LossArgumentError(
                f"label {batch.largest_label} is no token id of the student: they must lie between 0 and {ids - 1}"
            )

    def _hidden(self, rows: Tensor, teacher_hidden: Tensor, arguments: dict[str, Any]) -> Tensor | None:
        """Return the loss of this rank's own hidden states, without its weight, where there is one."""
        if self.projection is None:
            return None
        kind = self.loss.hidden_loss or COSINE
        return hidden_loss(rows, teacher_hidden, self.projection, kind, arguments["num_tokens"])

    def _with_own(
        self, loss: Tensor, out: StudentOutput, share: Tensor | None, hidden: Tensor | None
    ) -> tuple[Tensor, StudentOutput]:
        """Add this micro-batch's share of the router loss and its loss of hidden states, which belong to this rank
        alone, to loss and figures."""
        for name, value, weight in (
            ("router_aux", share, self.router and self.router.weight),
            ("hidden", hidden, self.loss.hidden_weight),
        ):
            if value is not None:
                weighted = weight * value
                out = replace(out, loss=out.loss.detach() + weighted.detach(), **{name: value.detach()})
                loss = loss + weighted.to(loss.dtype)
        return loss, out

    @torch.no_grad()
    def _teacher_ce(self, hidden: Tensor, labels: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Return the teacher's own cross-entropy: the loss with the teacher in the student's place."""
        head = self.teacher_head
        function = fused_kd_loss if self.loss.implementation == "fused" else reference_kd_loss
        return function(hidden, head, hidden, head, labels, **arguments | {"kd_weight": 0.0, "ce_weight": 1.0}).ce

    def _arguments(self, num_tokens: int, evaluation: bool) -> dict[str, Any]:
        loss = self.loss
        arguments = {
            "divergence": loss.divergence,
            "temperature": loss.temperature,
            "beta": loss.beta,
            "kd_weight": loss.kd_weight,
            "ce_weight": loss.ce_weight,
            "num_tokens": max(1, num_tokens),  # a step in which nothing counts has a loss of 0
        }
        if evaluation:
            arguments |= {"kd_weight": 1.0, "ce_weight": 1.0}
        if loss.implementation == "fused":
            arguments["memory_budget"] = None if loss.memory_budget == AUTO else parse_bytes(loss.memory_budget)
        return arguments


def _output(out: LossOutput, teacher_ce: Tensor | None) -> StudentOutput:
    zero = torch.zeros_like(out.ce)
    return StudentOutput(
        **vars(out),
        teacher_ce=zero if teacher_ce is None else teacher_ce,
        router_aux=zero,
        written_kd=zero,
        hidden=zero,
    )


def freeze(model: nn.Module, patterns: list[str]) -> list[str]:
    """Stop the gradients of all parameters whose name matches one of the shell patterns; return their names.

    Raises:
        UserError: when a pattern matches nothing, or everything is frozen.
    """
    names = dict(model.named_parameters(remove_duplicate=False))
    frozen = []
    for pattern in patterns:
        matched = fnmatch.filter(names, pattern)
        if not matched:
            some = ", ".join(list(names)[:3])
            raise UserError(f"student.freeze: {pattern!r} matches no parameter; names look like {some}")
        for name in matched:
            names[name].requires_grad_(False)
        frozen += matched
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("student.freeze: every parameter is frozen, so there is nothing to train")
    return frozen


def shard_student(
    module: StudentModule,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    checkpointing: str,
    *,
    vocabulary_parallel: bool = False,
    compiled: bool = False,
) -> None:
    """Shard the student over `mesh` with FSDP2, a unit a decoder layer; the root holds embeddings, norm and head.

    Gradients are summed over ranks, not averaged, over both dimensions of a `[replicate, shard]` mesh: the loss is
    already divided by the rows of the whole step. A model still on the CPU goes to the mesh's device unit by unit, so
    that it is never there whole.

    Args:
        module: the student and its loss.
        mesh: `[shard]`, or `[replicate, shard]` for HSDP.
        compute_dtype: of forward and backward; the parameters stay as they are.
        checkpointing: `none`, or `full`.
        vocabulary_parallel: take the head (and an embedding tied to it) out of FSDP, in shards of the vocabulary.
        compiled: compile each decoder layer's forward with torch.compile; FSDP's hooks stay outside of it.
    """
    if checkpointing == "full":
        module.model.gradient_checkpointing_enable({"use_reentrant": False})
    apart = None
    if vocabulary_parallel:
        module.vocabulary = VocabularyParallel(module.model, mesh, compute_dtype)
        apart = module.vocabulary.parameters
    low = compute_dtype != torch.float32
    dtypes = {"param_dtype": compute_dtype, "reduce_dtype": torch.float32} if low else {}
    for layer in decoder_layers(module.model)[1]:
        if compiled:
            layer.forward = torch.compile(layer.forward)
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(**dtypes))
    # The root's inputs are token ids and the teacher's hidden states, which keep the dtype they came in.
    policy = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)
    fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=apart)
    for unit in fsdp_units(module):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def shard_teacher(backbone: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard a frozen teacher's backbone over `mesh`, a unit a decoder layer, and return it (colocated runs).

    Units go to the mesh's device one by one. Under HSDP the mesh is that of one replica of the student: the layers then
    are gathered within a node, as the student's are, at the price of one teacher for each copy.
    """
    for parameter in backbone.parameters():
        parameter.requires_grad_(False)
    for layer in decoder_layers(backbone)[1]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(backbone, mesh=mesh)


def fsdp_units(module: nn.Module) -> list[FSDPModule]:
    """Return every FSDP unit of a module, itself included."""
    return [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
