"""Documents share a row only where the model keeps them apart, which is proved on the model itself."""

from types import SimpleNamespace

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


class Hearsay(torch.nn.Module):
    """A document's states are its own tokens', unless a token is in its row that the first row it saw had not."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(VOCABULARY, 16)
        self.known = None

    def forward(self, input_ids, position_ids, **arguments):
        self.known = set(input_ids.flatten().tolist()) if self.known is None else self.known
        heard = bool(set(input_ids.flatten().tolist()) - self.known)
        return SimpleNamespace(last_hidden_state=self.table(input_ids) + 0.1 * heard)


def test_a_leak_that_shows_with_other_neighbours_only_is_caught():
    torch.manual_seed(0)
    with pytest.raises(UserError, match="see each other"):
        verify_packing(Hearsay(), VOCABULARY, "the teacher")


class Shifted(torch.nn.Module):
    """A document's states depend on where in its row it stands, though on none of its neighbours' tokens."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(VOCABULARY, 16)

    def forward(self, input_ids, position_ids, **arguments):
        places = torch.arange(input_ids.shape[1])[None, :, None]
        return SimpleNamespace(last_hidden_state=self.table(input_ids) + 0.1 * (places - position_ids[..., None]))


def test_a_leak_that_no_neighbours_token_shows_is_caught():
    torch.manual_seed(0)
    with pytest.raises(UserError, match="see each other"):
        verify_packing(Shifted(), VOCABULARY, "the teacher")
