"""Does the student get the same gradient, however a global batch is cut into micro-batches and ranks?"""

from __future__ import annotations

import torch
from torch import Tensor

from disaggkd_cli.checks.loss import EQUAL_START, loss_arguments, plain_hidden_loss, student_module
from disaggkd_cli.checks.result import CheckResult, judge
from disaggkd_cli.checks.subject import Subject
from disaggkd_cli.losses import reference_kd_loss
from disaggkd_cli.losses.arguments import IGNORED_LABEL
from disaggkd_cli.models import backbone_of, head_of, hidden_states

_TOLERANCE = 1e-3
PROJECTION = "projection of hidden states"
LAYOUTS = {
    "one micro-batch": {"ranks": 1, "micro_batch_sequences": 4, "accumulation": 1},
    "accumulated twice": {"ranks": 1, "micro_batch_sequences": 2, "accumulation": 2},
    "over two ranks": {"ranks": 2, "micro_batch_sequences": 2, "accumulation": 1},
}
"""Ways to cut four sequences. The gradients of ranks are added up here as FSDP does it: summed, not averaged."""


def check_gradients(subject: Subject) -> CheckResult:
    """Compare each layout's summed gradient with plain autograd over the full logits of all rows at once."""
    reference = _full_gradient(subject)
    size = _norm(reference)
    parameters = _trained(subject)
    errors, projected = {}, ""
    for layout, cut in LAYOUTS.items():
        module = student_module(subject).to(subject.device)
        module.zero_grad(set_to_none=True)
        for item in subject.work_items(**cut):
            batch = item.batch.to(subject.device)
            loss, _ = module(batch, subject.contrary_states(batch), item.supervised_rows)
            loss.backward()
        difference = [_gradient(parameter) - reference[name] for name, parameter in parameters.items()]
        if module.projection is not None:
            difference.append(module.projection.grad - reference[PROJECTION])
            projected = "; the projection of hidden states too"
        errors[layout] = _norm(difference) / max(size, 1e-30)
    subject.student.zero_grad(set_to_none=True)
    worst = max(errors, key=errors.get)
    return judge(
        errors[worst] <= _TOLERANCE,
        f"differs by at most {errors[worst]:.1e} ({worst})",
        f"{len(LAYOUTS)} ways to cut four sequences of different lengths, float32, against plain autograd over full "
        f"logits of all rows; {sum(p.numel() for p in parameters.values()):,} parameters, norm {size:.3g}{projected}"
        f"{EQUAL_START if subject.starts_equal else ''}",
        "the gradient depends on how the batch is cut, or is not that of the loss (twice as large, for example)",
        tolerance=_TOLERANCE,
        norm=size,
        **{layout.replace(" ", "_").replace(",", ""): error for layout, error in errors.items()},
    )


def _full_gradient(subject: Subject) -> dict[str, Tensor]:
    """Return the gradient by parameter name, without the trainer's module and without the fused loss."""
    subject.student.zero_grad(set_to_none=True)
    batch = subject.batch
    states = hidden_states(backbone_of(subject.student), batch.input_ids, batch.position_ids)
    student_hidden = states.reshape(-1, states.shape[-1])[batch.rows]
    out = reference_kd_loss(
        student_hidden, head_of(subject.student), subject.contrary_states(batch), subject.teacher_head,
        batch.row_labels, compute_dtype=torch.float32, **loss_arguments(subject),
    )  # fmt: skip
    projection = student_module(subject).to(subject.device).projection
    rows = int((batch.row_labels != IGNORED_LABEL).sum())
    (out.loss + plain_hidden_loss(subject, student_hidden, subject.contrary_states(batch), projection, rows)).backward()
    own = {} if projection is None else {PROJECTION: projection.grad}
    return {name: _gradient(parameter).clone() for name, parameter in _trained(subject).items()} | own


def _trained(subject: Subject) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in subject.student.named_parameters() if parameter.requires_grad}


def _gradient(parameter: torch.nn.Parameter) -> Tensor:
    """Return a parameter's gradient; experts that no token went to have none."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _norm(gradients: dict[str, Tensor] | list[Tensor]) -> float:
    tensors = gradients.values() if isinstance(gradients, dict) else gradients
    return float(sum(tensor.double().square().sum().item() for tensor in tensors)) ** 0.5
