"""Models that nothing can be learnt from are refused, and the tensor at fault is named."""

import pytest
import torch

from disaggkd_cli.errors import UserError
from disaggkd_cli.models import head_of, load_head, resolve_source, verify_split
from disaggkd_cli.models.values import verify_weights
from tests.support.models import tiny_model


def verified(model, **options):
    return verify_split(model, head_of(model), "teacher.model x", **options)


def changed(family="llama", **changes):
    """A tiny model with some tensors overwritten: `name=value`, dots as double underscores."""
    model = tiny_model(family)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in changes.items():
            parameters[name.replace("__", ".")].copy_(torch.full((), value))
    return model


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_tensor_that_holds_no_numbers_is_named(value):
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[3, 5] = value
        model.model.layers[1].self_attn.q_proj.weight[0, 0] = value
    kind = "NaN" if value != value else "infinite"
    with pytest.raises(UserError) as caught:
        verified(model)
    message = str(caught.value)
    assert "teacher.model x: its logits are not finite" in message
    assert f"model.layers.1.self_attn.q_proj.weight (1 of 1,024 values are {kind})" in message
    assert "model.layers.2.mlp.up_proj.weight (1 of 1,536" in message


def test_a_part_of_a_model_is_looked_at_by_its_weights():
    layers = tiny_model("llama").model.layers
    verify_weights(layers, "x")
    with torch.no_grad():
        layers[1].mlp.up_proj.weight[0, :3] = float("nan")
    with pytest.raises(UserError, match=r"x: 1.mlp.up_proj.weight \(3 of 1,536 values are NaN\)"):
        verify_weights(layers, "x")


def test_an_overflow_is_told_from_damaged_weights():
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(6e4)
    model.half()
    with pytest.raises(UserError, match="overflow when computed in float16"):
        verified(model)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_embedding_of_zeros_is_refused(family):
    model = tiny_model(family, tie_word_embeddings=False)
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()
    with pytest.raises(UserError, match="its embedding .* holds nothing but zeros"):
        verified(model)


def test_constant_logits_are_refused_unless_the_weights_are_fresh():
    model = changed("llama", lm_head__weight=0.0)
    with pytest.raises(UserError, match=r"every id the same logit \(lm_head.weight hold nothing but zeros\)"):
        verified(model)
    verified(model, fresh=True)


def test_a_model_of_zeros_is_refused():
    model = tiny_model("qwen3")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with pytest.raises(UserError, match="nothing but zeros"):
        verified(model)


def test_a_head_that_is_read_alone_is_looked_at(tmp_path):
    for name, value, message in (("zero", 0.0, "lm_head.weight: holds nothing"), ("nan", float("nan"), "97 of 3,104")):
        model = tiny_model("llama")
        with torch.no_grad():
            model.lm_head.weight[: 97 if value == 0.0 else None, : None if value == 0.0 else 1] = value
        model.save_pretrained(tmp_path / name)
        with pytest.raises(UserError, match=message):
            load_head(resolve_source(str(tmp_path / name)), torch.float32, "teacher.model")
