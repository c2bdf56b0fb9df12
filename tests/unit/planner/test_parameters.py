"""Parameter counts: by hand for each kind of layer, and against transformers for every preset."""

from __future__ import annotations

import json

import pytest

from disaggkd_cli.planner.models import load_preset, preset_names, resolve_model
from disaggkd_cli.planner.models.families import model_shape
from disaggkd_cli.planner.models.parameters import count_parameters, layer_parameters, mixer_parameters, mlp_parameters
from disaggkd_cli.planner.models.shapes import (
    DenseMLP,
    ExpertMLP,
    GatedDeltaNet,
    GroupedQueryAttention,
    LatentAttention,
)
from disaggkd_cli.planner.models.trained import parameter_names, trained_share
from tests.support.models import tiny_model

from .planner_toys import toy_model


def test_dense_layer_by_hand():
    # q, o: 8*8 each; k, v: 8*4 each; three MLP matrices of 8*16; two norms of 8.
    shape = toy_model()
    assert layer_parameters(shape.layers[0], 8) == 2 * 64 + 2 * 32 + 3 * 128 + 2 * 8 == 592


def test_whole_model_by_hand():
    untied, tied = count_parameters(toy_model()), count_parameters(toy_model(tied=True))
    assert untied.total == 32 * 8 + 2 * 592 + 8 + 32 * 8 == 1704
    assert tied.total == 1704 - 32 * 8
    assert (untied.backbone, untied.root, untied.layers) == (1704 - 256, 256 + 8 + 256, 1184)


def test_gate_norms_biases_and_sinks_by_hand():
    plain = mixer_parameters(GroupedQueryAttention(2, 1, 4), 8)
    gated = mixer_parameters(GroupedQueryAttention(2, 1, 4, output_gate=True, qk_norm=True), 8)
    biased = mixer_parameters(GroupedQueryAttention(2, 1, 4, input_bias=True, output_bias=True, sinks=True), 8)
    assert gated - plain == 8 * 8 + 2 * 4
    assert biased - plain == (8 + 4 + 4) + 8 + 2


def test_latent_attention_by_hand():
    # h 10, query rank 4, kv rank 3, two heads of 5 + 2 for queries, values of 6.
    mixer = LatentAttention(heads=2, query_rank=4, kv_rank=3, nope_dim=5, rope_dim=2, value_dim=6)
    queries = 10 * 4 + 4 + 4 * 14
    keys_values = 10 * (3 + 2) + 3 + 3 * 2 * (5 + 6)
    assert mixer_parameters(mixer, 10) == queries + keys_values + 2 * 6 * 10 == 339


def test_delta_net_by_hand():
    # K = 2*3, Vd = 4*5: qkv 10*32, z 10*20, a and b 10*4 each, conv 32*4, A and dt 4 each, norm 5, out 20*10.
    mixer = GatedDeltaNet(key_heads=2, value_heads=4, key_dim=3, value_dim=5, kernel=4)
    assert mixer_parameters(mixer, 10) == 320 + 200 + 80 + 128 + 8 + 5 + 200 == 941


def test_experts_by_hand():
    mlp = ExpertMLP(experts=6, top_k=2, width=4, shared_width=3, shared_gate=True)
    router, shared, one = 10 * 6, 3 * 10 * 3 + 10, 3 * 10 * 4
    assert mlp_parameters(mlp, 10) == router + shared + 6 * one
    assert mlp_parameters(mlp, 10, active=True) == router + shared + 2 * one
    assert mlp_parameters(DenseMLP(4), 10, active=True) == 120


PUBLISHED = {
    "qwen3-8b": 8_190_735_360,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3.5-397b-a17b": 396_346_350_336,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    # 671,026,419,200 in the checkpoint: it counts the 58 routers' buffers of 256 correction terms as well.
    "deepseek-v3": 671_026_419_200 - 58 * 256,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_totals(name):
    assert count_parameters(resolve_model(name, "test")).total == PUBLISHED[name]


def test_active_parameters_are_those_in_the_names():
    billions = {"qwen3-30b-a3b": 3.35, "qwen3-235b-a22b": 22.19, "qwen3.5-35b-a3b": 3.45, "mixtral-8x7b": 12.88}
    for name, expected in billions.items():
        assert count_parameters(resolve_model(name, "test")).active / 1e9 == pytest.approx(expected, abs=0.01)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", preset_names())
def test_preset_equals_transformers_to_the_last_parameter(name):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = dict(load_preset(name)["config"])
    # Kimi-K2 is DeepSeek-V3's class under a name of its own; Phi's padding id has no place in a smaller vocabulary.
    model_type = config.pop("model_type").replace("kimi_k2", "deepseek_v3")
    if model_type == "phi3":
        config["pad_token_id"] = 0
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config))
    assert count_parameters(resolve_model(name, "test")).total == sum(one.numel() for one in model.parameters())


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3.5-9b", "qwen3-30b-a3b", "deepseek-v3", "gemma-3-4b"])
def test_parameter_names_add_up(name):
    shape = resolve_model(name, "test")
    assert sum(count for _, count in parameter_names(shape)) == count_parameters(shape).total


def test_names_of_dense_models_are_those_of_transformers():
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = dict(load_preset("qwen3-0.6b")["config"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    expected = {name: one.numel() for name, one in model.named_parameters()}
    assert dict(parameter_names(resolve_model("qwen3-0.6b", "test"))) == expected


def test_freezing_leaves_the_rest():
    shape = toy_model()
    share, head_trained = trained_share(shape, ["*embed_tokens*", "lm_head*"])
    assert (round(share * 1704), head_trained) == (1704 - 512, False)
    assert trained_share(shape, []) == (1.0, True)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "gemma2", "mistral"])
def test_a_config_as_transformers_writes_it(family, tmp_path):
    """The count of a directory that `save_pretrained` wrote is the model's own."""
    model = tiny_model(family)
    model.config.save_pretrained(tmp_path)
    shape = model_shape(json.loads((tmp_path / "config.json").read_text()), family, str(tmp_path))
    assert count_parameters(shape).total == sum(parameter.numel() for parameter in model.parameters())
