"""How payloads travel is agreed from what both sides say; what cannot be is refused with the mend."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from disaggkd_cli.errors import UserError
from disaggkd_cli.transport import Identity, IncompatiblePeer, TeacherPool, open_store, serve
from disaggkd_cli.transport.backends import agree_on_backend, describe_device
from disaggkd_cli.transport.cuda import cuda_of

STUDENT, TEACHER = Identity("student 0"), Identity("teacher 1")
CPU, GPU_A, GPU_B = "cpu", "cuda aaaa", "cuda bbbb"


def both(student, teacher):
    return (
        replace(STUDENT, device=student[0], backend=student[1]),
        replace(TEACHER, device=teacher[0], backend=teacher[1]),
    )


@pytest.mark.parametrize(
    ("student", "teacher", "backend"),
    [
        ((GPU_A, "auto"), (GPU_B, "auto"), "nccl"),
        ((GPU_A, "nccl"), (GPU_B, "auto"), "nccl"),
        ((GPU_A, "auto"), (GPU_B, "nccl"), "nccl"),
        ((GPU_A, "auto"), (GPU_A, "auto"), "gloo"),
        ((GPU_A, "gloo"), (GPU_B, "auto"), "gloo"),
        ((GPU_A, "auto"), (GPU_B, "gloo"), "gloo"),
        ((GPU_A, "auto"), (CPU, "gloo"), "gloo"),
        ((CPU, "gloo"), (GPU_A, "auto"), "gloo"),
        ((CPU, "gloo"), (CPU, "gloo"), "gloo"),
        (("", ""), (GPU_A, "auto"), "gloo"),
        (("", ""), ("", ""), "gloo"),
    ],
)
def test_both_sides_come_to_one_backend(student, teacher, backend):
    assert agree_on_backend(*both(student, teacher)) == backend


@pytest.mark.parametrize(
    ("student", "teacher", "says"),
    [
        ((GPU_A, "nccl"), (GPU_A, "auto"), "share one GPU.*aaaa.*use auto or gloo"),
        ((GPU_A, "nccl"), (GPU_A, "nccl"), "share one GPU"),
        ((GPU_A, "nccl"), (GPU_B, "gloo"), "student 0 has nccl, teacher 1 takes gloo; give both"),
        ((GPU_A, "gloo"), (GPU_B, "nccl"), "teacher 1 has nccl, student 0 takes gloo"),
        ((GPU_A, "nccl"), (CPU, "gloo"), "teacher 1 takes gloo and computes on the CPU"),
    ],
)
def test_nccl_that_cannot_be_is_refused_with_the_mend(student, teacher, says):
    with pytest.raises(IncompatiblePeer, match=says):
        agree_on_backend(*both(student, teacher))


def test_a_rank_on_the_cpu_takes_gloo_and_cannot_insist_on_nccl():
    cpu = torch.device("cpu")
    assert describe_device(cpu, "auto") == describe_device(cpu, "gloo") == {"device": "cpu", "backend": "gloo"}
    assert cuda_of(cpu) is None
    with pytest.raises(UserError, match="transport.backend: nccl .* on the CPU; use auto or gloo"):
        describe_device(cpu, "nccl")


def test_a_gpu_names_itself_and_what_its_torch_can_do(monkeypatch):
    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"id-{device.index}"))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert describe_device(gpu, "auto") == {"device": "cuda id-1", "backend": "auto"}
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert describe_device(gpu, "auto") == {"device": "cuda id-1", "backend": "gloo"}
    with pytest.raises(UserError, match="not part of this build of torch"):
        describe_device(gpu, "nccl")


def test_nccl_on_the_cpu_ends_either_side_at_its_start():
    store = open_store("127.0.0.1:0", host_it=True)
    with pytest.raises(UserError, match="transport.backend"):
        TeacherPool(store, STUDENT, backend="nccl")
    with pytest.raises(UserError, match="transport.backend"):
        serve(store.clone, TEACHER, lambda request: None, backend="nccl")
