"""Stages of a backbone give the bits of the whole, for every class that hands on nothing but hidden states."""

import copy

import pytest
import torch
from torch import nn

from disaggkd_cli.errors import UserError
from disaggkd_cli.models import backbone_of, hidden_states, load_causal_lm, resolve_source
from disaggkd_cli.models.load import without_weights
from disaggkd_cli.models.load_stage import layer_costs, layer_seconds, load_stage, stage_bytes
from disaggkd_cli.models.small import small_config
from disaggkd_cli.models.stages import Stage, prove_on, prove_stages
from tests.support.models import VOCABULARY, tiny_model

CPU = torch.device("cpu")
GLM4_MOE = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
CLASSES = [
    "llama", "qwen3", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_5_text", "qwen3_5_moe_text",
    "qwen3_next", "gemma2", "gemma3_text", "smollm3", "olmo2", "granite", "glm4", "glm4_moe", "phi3", "cohere2",
]  # fmt: skip
MORE_CLASSES = ["gpt2", "phi", "falcon_h1", "granitemoehybrid", "llama4_text", "nanochat", "cohere", "minicpm3"]


def model_of(family: str) -> nn.Module:
    return tiny_model(family, **(GLM4_MOE if family == "glm4_moe" else {}))


def some_tokens(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (3, 19), generator=generator)
    return ids, torch.cat([torch.arange(7), torch.arange(12)]).expand(3, 19)


@pytest.mark.parametrize(
    "family", [*CLASSES, *(pytest.param(family, marks=pytest.mark.slow) for family in MORE_CLASSES)]
)
def test_stages_read_from_files_give_the_bits_of_the_whole(family, tmp_path):
    """The proof passes on a small model made from the configuration; the real stages agree with the real model."""
    model_of(family).save_pretrained(tmp_path)
    source = resolve_source(str(tmp_path))
    whole = backbone_of(load_causal_lm(source, torch.float32, "teacher.model"))
    model = without_weights(source, torch.float32, "teacher.model")
    anatomy = prove_stages(model, torch.float32, CPU, "auto", family)
    ids, positions = some_tokens(len(family))
    states, taken = None, 0
    for layers in ((0, 1), (1, 3), (3, 4)):
        stage = load_stage(source, model, anatomy, layers, "auto")
        with torch.no_grad():
            states = stage.forward(ids, positions, states)
        taken += stage_bytes(stage)
        assert len(stage.own_layers()) == layers[1] - layers[0]
    with torch.no_grad():
        assert torch.equal(states, hidden_states(whole, ids, positions))
    every = sum(tensor.nbytes for tensor in [*whole.parameters(), *whole.buffers()])
    assert taken <= every + 8192  # each weight once; small tables of positions are everywhere
    assert len(layer_costs(model, anatomy)) == 4


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "gpt_oss"])
def test_the_proof_holds_in_bfloat16_and_for_a_model_at_hand(family):
    prove_on(model_of(family).bfloat16())


def test_every_cut_of_one_model():
    backbone = backbone_of(model_of("gemma2"))
    anatomy = prove_on(model_of("gemma2"))
    ids, positions = some_tokens(3)
    with torch.no_grad():
        whole = hidden_states(backbone, ids, positions)
        for first in range(1, 4):
            states = Stage(copy.deepcopy(backbone), anatomy, 0, first).forward(ids, positions)
            states = Stage(copy.deepcopy(backbone), anatomy, first, 4).forward(ids, positions, states)
            assert torch.equal(states, whole)


def test_a_class_whose_layers_read_the_embedded_tokens_is_refused():
    model = model_of("llama")
    rotary = model.model.rotary_emb

    class ReadsEmbeddings(type(rotary)):
        def forward(self, states, position_ids):
            cosine, sine = super().forward(states, position_ids)
            return cosine + states.mean(), sine

    rotary.__class__ = ReadsEmbeddings
    with pytest.raises(UserError, match="its layers hand on more than the hidden states: .* differs from the whole"):
        prove_on(model)


def test_a_class_whose_layers_keep_something_for_later_ones_is_refused():
    model = model_of("llama")
    layers = model.model.layers
    layer_class = type(layers[0])

    class Keeps(layer_class):
        def forward(self, states, **named):
            self.store.kept = super().forward(states, **named)
            return self.store.kept

    class Uses(layer_class):
        def forward(self, states, **named):
            return super().forward(states, **named) + self.store.kept

    layers[0].store = layers[3].store = nn.Module()
    layers[0].__class__, layers[3].__class__ = Keeps, Uses
    with pytest.raises(UserError, match="the staged forward of a small one fails .* has no attribute 'kept'"):
        prove_on(model)


def test_layers_in_another_order_are_refused():
    model = model_of("llama")
    order = list(model.model.layers)
    model.model.layers.__class__ = type(
        "Shuffled", (nn.ModuleList,), {"__getitem__": lambda self, index: [order[1], order[0], *order[2:]][index]}
    )
    with pytest.raises(UserError, match="do not run once each, one after the other"):
        prove_on(model)


def test_the_refusal_names_key_class_and_mend(monkeypatch):
    monkeypatch.setattr("disaggkd_cli.models.stages.small_random_model", lambda *_: model_of("llama"))

    def refuse(small):
        raise UserError("it hands on two tensors")

    monkeypatch.setattr("disaggkd_cli.models.stages.prove_on", refuse)
    expected = (
        "teacher.parallelism: DIR (LlamaForCausalLM) cannot be cut into stages: it hands on two tensors; use fsdp, or "
        "teacher.ranks_per_replica=1"
    )
    with pytest.raises(UserError) as refused:
        prove_stages(model_of("llama"), torch.float32, CPU, "auto", "DIR")
    assert str(refused.value) == expected


def test_small_models_keep_every_kind_of_layer():
    config = model_of("deepseek_v3").config
    config.num_hidden_layers, config.first_k_dense_replace = 30, 20
    small = small_config(config)
    assert 0 < small.first_k_dense_replace < small.num_hidden_layers < 30
    config = model_of("gemma3_text").config
    config.layer_types = ["sliding_attention"] * 11 + ["full_attention"]
    config.num_hidden_layers = 12
    assert set(small_config(config).layer_types) == {"sliding_attention", "full_attention"}


def test_experts_count_by_those_that_a_token_meets():
    model = model_of("qwen3_moe")
    anatomy = prove_on(model)
    layer = model.model.layers[0]
    experts = sum(one.numel() for one in layer.mlp.experts.parameters())
    every = sum(one.numel() for one in layer.parameters())
    assert layer_costs(model, anatomy) == [every - experts / 2] * 4


def test_layers_are_timed_one_by_one():
    stage = Stage(backbone_of(model_of("llama")), prove_on(model_of("llama")), 1, 3)
    seconds = layer_seconds(stage, 2, 16, 32, VOCABULARY, torch.float32)
    assert len(seconds) == 2 and all(one > 0 for one in seconds)
