"""What cannot be split exactly is refused with a reason; text towers of multimodal checkpoints are found."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import AutoConfig, AutoModelForImageTextToText

from disaggkd_cli.errors import UserError
from disaggkd_cli.models import head_of, load_causal_lm, load_head, resolve_source, student_from_layers, verify_split
from tests.support.models import ALL_FAMILIES, SMALL, tiny_model


class LowRankLinear(nn.Module):
    """An adapter as it is at the start: it has the base weight's name and changes nothing yet."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base_layer = base
        self.down = nn.Parameter(torch.randn(2, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, hidden):
        return self.base_layer(hidden) + hidden @ self.down.T @ self.up.T


class ScaledLinear(nn.Linear):
    def forward(self, hidden):
        return 1.5 * super().forward(hidden)


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


def with_adapter(model):
    model.lm_head = LowRankLinear(model.lm_head)


def with_another_forward(model):
    model.lm_head.__class__ = ScaledLinear


def with_a_hook(model):
    model.lm_head.register_forward_hook(lambda module, inputs, output: output)


def with_a_parametrization(model):
    parametrize.register_parametrization(model.lm_head, "weight", Twice())


@pytest.mark.parametrize("change", [with_adapter, with_another_forward, with_a_hook, with_a_parametrization])
def test_a_head_that_is_no_plain_linear_layer(change):
    model = tiny_model("llama")
    head_of(model)
    change(model)
    with pytest.raises(UserError, match="not a plain linear layer"):
        head_of(model)


def test_an_unknown_treatment_of_the_logits():
    model = tiny_model("llama")
    forward = model.forward

    def hotter(**arguments):
        out = forward(**arguments)
        out.logits = out.logits * 1.01
        return out

    model.forward = hotter
    with pytest.raises(UserError, match="does something to its logits that is not known here"):
        verify_split(model, head_of(model), "the teacher")


def test_layers_whose_shapes_the_configuration_cannot_describe():
    model = tiny_model("llama")
    wide = tiny_model("llama", intermediate_size=96)
    model.model.layers[2].mlp = wide.model.layers[2].mlp
    with pytest.raises(UserError, match="cannot be cut to layers"):
        student_from_layers(model, "every_2", torch.float32)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe", "gemma3"])
def test_the_text_tower_of_a_multimodal_checkpoint(kind, tmp_path):
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "depth": 1, "num_heads": 2, "num_attention_heads": 2,
              "intermediate_size": 16, "out_hidden_size": 32}  # fmt: skip
    config = AutoConfig.for_model(kind, text_config={**SMALL, **ALL_FAMILIES[f"{kind}_text"]}, vision_config=vision)
    whole = AutoModelForImageTextToText.from_config(config)
    whole.save_pretrained(tmp_path)
    source = resolve_source(str(tmp_path))
    model = load_causal_lm(source, torch.float32, "teacher.model")
    assert verify_split(model, head_of(model), kind) < 1e-5
    assert torch.equal(load_head(source, torch.float32, "teacher.model").weight, whole.lm_head.weight)
    student = student_from_layers(model, "every_2", torch.float32)
    assert student.config.get_text_config().num_hidden_layers == 2
