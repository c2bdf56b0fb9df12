"""The copy that writes has the student's weights while it writes, and nothing of them afterwards."""

import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from disaggkd_cli.on_policy.gathered import GatheredStudent
from tests.support.models import tiny_model


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_remains_after_a_window(alone, fails):
    model = tiny_model("llama")
    wanted = {name: one.detach().to(torch.bfloat16) for name, one in model.named_parameters()}
    copy = GatheredStudent(model, torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    held = []
    try:
        with copy.with_weights(model) as whole:
            for name, one in whole.named_parameters():
                assert type(one.data) is torch.Tensor and torch.equal(one, wanted[name])
                held.append(weakref.ref(one))
            one = None
            if fails:
                raise RuntimeError("while it writes")
    except RuntimeError:
        pass
    assert len(held) == len(wanted) and all(one() is None for one in held)
    assert all(one.is_meta for one in [*copy.model.parameters(), *copy.model.buffers()])


def test_on_one_rank_in_its_own_dtype_nothing_is_copied(alone):
    model = tiny_model("llama")
    copy = GatheredStudent(model, torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with copy.with_weights(model) as whole:
        shared = {one.data_ptr() for one in whole.parameters()}
        assert shared == {one.to_local().data_ptr() for one in model.parameters()}
