"""Documents share a row only where the model keeps them apart, which is proved on the model itself."""

import pytest
import torch

from disaggkd_cli.errors import UserError
from disaggkd_cli.models import backbone_of, packs_documents, verify_packing
from tests.support.models import FAMILIES, VOCABULARY, tiny_model


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt2"])
def test_attention_keeps_documents_apart(family):
    model = tiny_model(family)
    assert packs_documents(model.config)[0]
    assert verify_packing(backbone_of(model), VOCABULARY, family) < 1e-4


def test_a_delta_net_does_not():
    model = tiny_model(
        "qwen3_5_text",
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    packs, reason = packs_documents(model.config)
    assert not packs
    assert "linear_attention" in reason
    with pytest.raises(UserError, match="set data.packing=off"):
        verify_packing(backbone_of(model), VOCABULARY, "the teacher")


def test_a_model_that_leaks_is_caught_whatever_its_kind():
    model = tiny_model("llama")
    backbone = backbone_of(model)
    forward = backbone.forward

    def forgetful(input_ids, position_ids, **arguments):
        positions = torch.arange(input_ids.shape[1])[None]
        return forward(input_ids=input_ids, position_ids=positions, **arguments)

    backbone.forward = forgetful
    with pytest.raises(UserError, match="see each other"):
        verify_packing(backbone, VOCABULARY, "the teacher")
