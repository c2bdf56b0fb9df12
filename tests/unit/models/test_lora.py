"""Adapters train and the base does not; merged weights and adapters alone give the adapted model's logits."""

import copy
from types import SimpleNamespace

import pytest
import torch

from disaggkd_cli.errors import UserError
from disaggkd_cli.models import head_of, verify_split
from disaggkd_cli.models.lora import add_adapters, has_adapters, merged_state, save_adapters
from tests.support.models import VOCABULARY, tiny_model

TARGETS = {
    "llama": ["q_proj", "down_proj"],
    "gpt2": ["c_attn"],
    "qwen3_5_text": ["o_proj", "up_proj"],
    "gemma2": "all-linear",
}


def settings(targets, rank=4):
    return SimpleNamespace(rank=rank, alpha=8.0, targets=targets, dropout=0.0)


def adapted(family):
    model = tiny_model(family)
    base = copy.deepcopy(model)
    names = add_adapters(model, settings(TARGETS[family]), seed=1)
    assert names
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.3)
    return model.eval(), base


def logits(model):
    ids = torch.arange(3, 14)[None] % VOCABULARY
    with torch.no_grad():
        return model(input_ids=ids, position_ids=torch.arange(11)[None], use_cache=False).logits


@pytest.mark.parametrize("family", TARGETS)
def test_only_adapters_train_and_the_split_still_holds(family):
    model, base = adapted(family)
    assert has_adapters(model)
    assert not has_adapters(base)
    assert type(model) is type(base)
    assert all((".lora_" in name) == parameter.requires_grad for name, parameter in model.named_parameters())
    assert verify_split(model, head_of(model), "the student") < 1e-5


@pytest.mark.parametrize("family", TARGETS)
def test_merged_weights_are_the_adapted_model(family):
    model, base = adapted(family)
    assert not torch.allclose(logits(model), logits(base), atol=1e-2)
    base.load_state_dict(merged_state(model, model.state_dict()), strict=True)
    torch.testing.assert_close(logits(base), logits(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", TARGETS)
def test_peft_loads_the_adapters(family, tmp_path):
    from peft import PeftModel

    model, base = adapted(family)
    save_adapters(model, model.state_dict(), tmp_path)
    again = PeftModel.from_pretrained(base, tmp_path).eval()
    assert torch.equal(logits(again), logits(model))


def test_the_first_weights_follow_the_seed():
    states = []
    for seed in (1, 1, 2):
        model = tiny_model("llama")
        add_adapters(model, settings(["q_proj"]), seed)
        states.append(model.state_dict()["model.layers.0.self_attn.q_proj.lora_A.default.weight"])
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


@pytest.mark.parametrize(
    ("targets", "said"), [(["lm_head"], "LM head cannot have an adapter"), (["nothing"], "nothing")]
)
def test_targets_that_cannot_be(targets, said):
    with pytest.raises(UserError, match=f"student.lora.targets: .*{said}"):
        add_adapters(tiny_model("llama"), settings(targets), 0)
