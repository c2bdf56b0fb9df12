"""Quantised teachers are planned as they are held: by the checkpoint's own quantization_config."""

import json

import pytest

from disaggkd_cli.errors import UserError
from disaggkd_cli.planner.inputs import workload_of
from disaggkd_cli.planner.memory import teacher_rank
from disaggkd_cli.planner.models import load_preset, resolve_model
from disaggkd_cli.planner.models.parameters import count_parameters
from disaggkd_cli.planner.models.quantised import backbone_bytes, quantised_of, requested

from .test_layouts import config_of

GIB = 2**30
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                                            "model.embed_tokens", "lm_head"]}  # fmt: skip
COMPRESSED = {
    "quant_method": "compressed-tensors", "ignore": ["lm_head", "re:.*mlp.gate$"],
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}  # fmt: skip


def planned(tmp_path, preset, quantization, gpu="H100-SXM", **keys):
    fields = load_preset(preset)["config"] | {"quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = config_of(str(tmp_path), **keys)
    config.hardware.gpu = gpu
    return workload_of(config)


def weights(work):
    return next(one.value for one in teacher_rank(work).binding.terms if one.name == "teacher weights")


@pytest.mark.parametrize(
    ("preset", "quantization", "keys", "gib"),
    [
        # Sizes of the published checkpoints, less their heads.
        ("qwen3-32b", AWQ, {}, 16.6),
        ("deepseek-v3", FP8, {"ranks_per_replica": 8, "parallelism": "pipeline"}, 86.9),
        ("gpt-oss-120b", MXFP4, {}, 59.7),
        ("qwen3-32b", COMPRESSED, {}, 30.6),
    ],
)
def test_what_is_held(tmp_path, preset, quantization, keys, gib):
    assert weights(planned(tmp_path, preset, quantization, **keys)) / GIB == pytest.approx(gib, rel=0.02)


def test_by_hand():
    shape = resolve_model("llama-3.2-1b", "test")
    layer = 2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192
    held = quantised_of({"quantization_config": AWQ}, "teacher.model", architecture="hopper")
    assert backbone_bytes(shape, 2, held)[0] == pytest.approx(layer * (0.5 + 2.5 / 128) + 2 * 2 * 2048)
    ignoring = quantised_of({"quantization_config": AWQ | {"modules_to_not_convert": ["mlp"]}}, "t", architecture="ada")
    assert backbone_bytes(shape, 2, ignoring)[0] == pytest.approx(
        (2 * 2048 * 2048 + 2 * 2048 * 512) * (0.5 + 2.5 / 128) + 2 * (3 * 2048 * 8192 + 2 * 2048)
    )
    assert backbone_bytes(shape, 2, requested("int8"))[0] == layer + 2 * 2 * 2048


def test_where_float8_is_not_kept(tmp_path):
    """Ampere has no float8: transformers makes it bfloat16 at load. CPUs likewise."""
    plain = 2 * count_parameters(resolve_model("qwen3-32b", "test")).backbone
    assert weights(planned(tmp_path, "qwen3-32b", FP8, gpu="A100-80-SXM")) == plain
    assert quantised_of({"quantization_config": MXFP4}, "t", architecture="hopper", on_cpu=True) is None
    assert weights(planned(tmp_path, "qwen3-32b", FP8)) < 0.55 * plain


def test_layouts_that_cut_quantised_weights_are_refused(tmp_path):
    for parallelism in ("tensor", "fsdp"):
        with pytest.raises(UserError, match="awq weights"):
            planned(tmp_path, "qwen3-32b", AWQ, ranks_per_replica=2, parallelism=parallelism)
    assert planned(tmp_path, "qwen3-32b", AWQ, ranks_per_replica=2, parallelism="pipeline").refused is None


def test_an_unknown_method_is_refused(tmp_path):
    with pytest.raises(UserError, match="teacher.model: .*'hqq'.*does not know"):
        planned(tmp_path, "qwen3-32b", {"quant_method": "hqq"})
