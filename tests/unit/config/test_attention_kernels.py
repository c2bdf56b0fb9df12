"""One owner says what a name of attention kernels means, and transformers agrees."""

import pytest

from disaggkd_cli.config import Config, StudentConfig, TeacherConfig, check
from disaggkd_cli.config.attention import (
    ATTENTION,
    GPU_ONLY,
    VARLEN,
    builds_dense_mask,
    kernel_that_runs,
    unproved_with_packing,
)
from tests.support.models import tiny_model


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gemma3_text", "qwen3_moe"])
def test_auto_is_what_transformers_takes(family):
    config = tiny_model(family).config
    softcap = getattr(config, "attn_logit_softcapping", None) is not None
    assert kernel_that_runs("auto", softcap=softcap) == config._attn_implementation


@pytest.mark.parametrize("name", ATTENTION)
def test_a_name_is_taken_where_it_can_be(name):
    runs = "sdpa" if name == "auto" else name
    assert kernel_that_runs(name) == runs
    assert kernel_that_runs(name, sinks=True) == (name if name == "flex_attention" else "eager")
    assert builds_dense_mask(runs, packed=True, windowed=False) == (name not in GPU_ONLY)
    assert builds_dense_mask(runs, packed=False, windowed=True) == (name not in GPU_ONLY)
    assert builds_dense_mask(runs, packed=False, windowed=False) == (name == "eager")


@pytest.mark.parametrize("name", GPU_ONLY)
@pytest.mark.parametrize("side", ["teacher", "student"])
def test_what_needs_a_gpu_is_refused_on_the_cpu_and_packs_only_when_told_to(name, side):
    config = Config(student=StudentConfig(dtype="float32"), teacher=TeacherConfig(dtype="float32"))
    getattr(config, side).attention = name
    assert any(f"{side}.attention: {name} computes in 16 bits" in one for one in check(config)) == (name in VARLEN)
    config.launch.device = "cpu"
    assert any(f"{side}.attention: {name} needs a GPU, but" in one for one in check(config))
    assert unproved_with_packing(config).startswith(f"{name} packs only with data.packing=on")
    assert unproved_with_packing(Config()) is None
