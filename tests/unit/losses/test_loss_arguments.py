"""Wrong arguments are refused with the name of the argument and the mend."""

from __future__ import annotations

import pytest
import torch

from disaggkd_cli.errors import UserError
from disaggkd_cli.losses import Head, fused_kd_loss, reference_kd_loss

from .loss_cases import make_case


def _broken(**changes):
    """Arguments of a sound small loss, with some replaced."""
    case = make_case(0, rows=4, vocabulary=9, student_width=3, teacher_width=5)
    arguments = dict(
        student_hidden=case.student_hidden, student_head=case.student_head, teacher_hidden=case.teacher_hidden,
        teacher_head=case.teacher_head, labels=case.labels,
    )  # fmt: skip
    return {**arguments, **changes}


F64 = dict(dtype=torch.float64)


@pytest.mark.parametrize("loss", [fused_kd_loss, reference_kd_loss])
@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(divergence="kl"), "divergence='kl' is unknown; it is one of forward_kl"),
        (dict(temperature=0.0), "temperature=0.0 must be a positive"),
        (dict(temperature=float("nan")), "temperature=nan"),
        (dict(kd_weight=-1.0), "kd_weight=-1.0"),
        (dict(ce_weight=1.0, labels=None), "ce_weight=1.0 needs labels"),
        (dict(divergence="jsd", beta=1.5), "beta=1.5 must lie between 0 and 1"),
        (dict(divergence="jsd", beta=0.0), "choose forward_kl or reverse_kl"),
        (dict(divergence="skewed_forward_kl", beta=1), "beta=1 makes skewed_forward_kl zero"),
        (dict(student_hidden=torch.randn(2, 2, 3, **F64)), r"student_hidden must be \[rows, width\]"),
        (dict(student_hidden=torch.randn(4, 2, **F64)), "the student head's weight is"),
        (dict(teacher_hidden=torch.randn(3, 5, **F64)), "student_hidden has 4 rows and teacher_hidden 3"),
        (dict(teacher_head=torch.randn(9, 5)), "the teacher head must be a Head"),
        (dict(teacher_head=Head(torch.randn(9, 5), torch.randn(8))), r"the teacher head's bias must be \[9\]"),
        (dict(teacher_head=Head(torch.randn(9, 5), softcap=0.0)), "the teacher head's softcap"),
        (dict(teacher_hidden=torch.ones(4, 5, dtype=torch.int64)), "teacher_hidden must be of a floating dtype"),
        (dict(teacher_hidden=torch.ones(4, 5, device="meta")), "move one"),
        (dict(labels=torch.zeros(5, dtype=torch.int64)), r"labels must be \[4\]"),
        (dict(labels=torch.zeros(4)), "labels are token ids and must be integers"),
        (dict(num_tokens=-3), "num_tokens=-3 must not be negative"),
        (dict(num_tokens=torch.ones(2)), "num_tokens must be one number"),
    ],
)
def test_wrong_arguments(loss, changes, message):
    with pytest.raises(UserError, match=message) as caught:
        loss(**_broken(**changes))
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("label", [9, -1, -101])
def test_labels_that_are_no_ids(label):
    with pytest.raises(UserError, match="1 labels are no token ids: they must lie between 0 and 8"):
        fused_kd_loss(**_broken(labels=torch.tensor([1, label, -100, 3])))


def test_a_dtensor_is_refused_with_both_ways_out(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        arguments = _broken()
        mesh = init_device_mesh("cpu", (1,))
        weight = distribute_tensor(arguments["student_head"].weight.detach(), mesh, [Shard(0)])
        with pytest.raises(UserError, match="is a DTensor.*inside the forward of the FSDP module.*with group="):
            fused_kd_loss(**_broken(student_head=Head(weight)))
        # The teacher's is frozen, so that gathering it is all there is to do.
        whole = fused_kd_loss(**_broken())
        teacher = distribute_tensor(arguments["teacher_head"].weight, mesh, [Shard(0)])
        assert fused_kd_loss(**_broken(teacher_head=Head(teacher))).loss.item() == whole.loss.item()
    finally:
        dist.destroy_process_group()
