"""flex_attention: transformers' code for it above torch's own flex_attention, run on the CPU without its compiler."""

import pytest
import torch
import transformers.integrations.flex_attention as flex
import transformers.masking_utils as masking
from torch.nn.attention.flex_attention import BlockMask

from disaggkd_cli.data import position_ids_from_lengths
from disaggkd_cli.errors import UserError
from disaggkd_cli.models import attention, backbone_of, set_attention
from disaggkd_cli.models.head import hidden_states
from tests.support.models import VOCABULARY, tiny_model

LENGTHS = [(5, 3, 8), (9, 7), (16,)]


@pytest.fixture
def masks(monkeypatch):
    """Let flex_attention run here, uncompiled; note what it was given as masks, and each dense one that was built."""
    given = []
    make = masking.create_block_mask

    def watched(query, key, value, block_mask=None, training=False, **rest):
        given.append(type(block_mask))
        return flex.flex_attention(query, key, value, block_mask=block_mask, **rest)

    monkeypatch.setattr(attention, "require_attention", lambda *_: None)
    monkeypatch.setattr(flex, "compile_friendly_flex_attention", watched)
    monkeypatch.setattr(masking, "create_block_mask", lambda **options: make(**options | {"_compile": False}))
    for name in ("sdpa", "eager"):
        dense = masking.ALL_MASK_ATTENTION_FUNCTIONS[name]
        monkeypatch.setitem(
            masking.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping,
            name,
            lambda *arguments, dense=dense, **rest: given.append("dense") or dense(*arguments, **rest),
        )
    return given


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])  # gemma2: soft caps, windows
@torch.no_grad()
def test_packed_documents_have_the_states_of_dense_masks(masks, family):
    model, oracle = tiny_model(family), tiny_model(family)
    positions = position_ids_from_lengths(LENGTHS)
    ids = torch.randint(0, VOCABULARY, positions.shape)
    expected = hidden_states(backbone_of(oracle), ids, positions, LENGTHS)
    assert "dense" in masks
    masks.clear()
    set_attention(model, "flex_attention", "teacher.attention")
    states = hidden_states(backbone_of(model), ids, positions, LENGTHS)
    torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)
    assert masks == [BlockMask] * model.config.num_hidden_layers
    assert states.dtype == torch.float32


def test_dropout_is_refused(masks):
    model = tiny_model("llama")
    model.config.attention_dropout = 0.1
    with pytest.raises(UserError, match=r"student.attention: flex_attention has no dropout.*is 0.1; use sdpa"):
        set_attention(model, "flex_attention", "student.attention")


@pytest.mark.parametrize("name", ["flash_attention_3", "flex_attention"])
def test_without_a_gpu_it_is_refused(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(attention, "is_flash_attn_3_available", lambda: False)
    with pytest.raises(UserError, match=f"teacher.attention: {name} needs .*GPU"):
        set_attention(tiny_model("llama"), name, "teacher.attention")


def test_proofs_on_a_cpu_leave_the_choice_to_transformers():
    model = tiny_model("llama")
    attention.set_attention_of_checks(model, "flex_attention", "teacher.attention", torch.device("cpu"))
    assert model.config._attn_implementation == "sdpa"
    attention.set_attention_of_checks(model, "eager", "teacher.attention", torch.device("cpu"))
    assert model.config._attn_implementation == "eager"
