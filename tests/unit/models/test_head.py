"""A causal LM splits into backbone and head, and the split is proved on its own logits."""

import pytest
import torch

from disaggkd_cli.errors import UserError
from disaggkd_cli.losses import Head
from disaggkd_cli.models import backbone_of, head_of, hidden_states, verify_split
from tests.support.models import FAMILIES, VOCABULARY, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_splits(family):
    model = tiny_model(family)
    head = head_of(model)
    assert verify_split(model, head, family) < 1e-5
    assert head.weight.shape == (VOCABULARY, 32)
    assert head.weight is model.get_output_embeddings().weight


def test_what_the_heads_do():
    assert head_of(tiny_model("gemma2")).softcap == 3.0
    assert head_of(tiny_model("granite")).scale == 0.25
    assert head_of(tiny_model("cohere")).scale == 0.25
    assert head_of(tiny_model("phi")).bias is not None
    assert head_of(tiny_model("llama")).bias is None


@pytest.mark.parametrize(
    "wrong",
    [
        lambda head: Head(head.weight, head.bias, 1.1, head.softcap),
        lambda head: Head(head.weight, head.bias, head.scale, 5.0),
        lambda head: Head(head.weight, torch.ones(VOCABULARY), head.scale, head.softcap),
        lambda head: Head(head.weight.roll(1, 0), head.bias, head.scale, head.softcap),
    ],
)
def test_a_wrong_split_is_refused(wrong):
    model = tiny_model("gemma2")
    with pytest.raises(UserError, match="does something to its logits that is not known here"):
        verify_split(model, wrong(head_of(model)), "the teacher")


@pytest.mark.parametrize("dtype, off", [(torch.float32, 2e-5), (torch.bfloat16, 0.25)])
def test_logits_a_little_off_are_refused(dtype, off):
    """Ten times what rounding makes of the same product."""
    model = tiny_model("llama").to(dtype)
    head = head_of(model)
    with pytest.raises(UserError, match="that is not known here"):
        verify_split(model, Head(head.weight, head.bias, 1 + off, head.softcap), "the teacher")


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_head_with_a_hook_is_refused_though_it_changes_nothing_yet(kind):
    model = tiny_model("llama")
    handle = getattr(model.lm_head, kind)(lambda *_: None)
    with pytest.raises(UserError, match="hooked head"):
        head_of(model)
    handle.remove()
    head_of(model)


def test_a_head_that_was_replaced_is_refused():
    model = tiny_model("llama")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises((UserError, AttributeError)):
        head_of(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_split_holds_in_low_precision(dtype):
    model = tiny_model("gemma2").to(dtype)
    verify_split(model, head_of(model), "the teacher")


def test_padding_on_the_right_changes_nothing():
    model = tiny_model("llama")
    ids = torch.randint(3, VOCABULARY, (1, 9))
    padded = torch.cat([ids, torch.zeros(1, 4, dtype=torch.long)], dim=1)
    positions = torch.cat([torch.arange(9), torch.arange(4)])[None]
    with torch.no_grad():
        alone = hidden_states(backbone_of(model), ids, torch.arange(9)[None])
        with_padding = hidden_states(backbone_of(model), padded, positions)
    torch.testing.assert_close(with_padding[:, :9], alone)
