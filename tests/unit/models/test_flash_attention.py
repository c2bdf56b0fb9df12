"""Packed documents under flash_attention_2: transformers' code for it, above flash-attn's functions in plain torch."""

import pytest
import torch
import transformers.modeling_flash_attention_utils as flash

from disaggkd_cli.config.attention import FLASH
from disaggkd_cli.data import position_ids_from_lengths
from disaggkd_cli.models import backbone_of
from disaggkd_cli.models.attention import document_boundaries
from disaggkd_cli.models.head import hidden_states
from tests.support.models import VOCABULARY, tiny_model


def attend(query, key, value, causal, softmax_scale, window):
    """Attention of [L, heads, D] within one document."""
    repeat = query.shape[1] // key.shape[1]
    query, key, value = (one.transpose(0, 1) for one in (query, key, value))
    key, value = (one.repeat_interleave(repeat, 0) for one in (key, value))
    places = torch.arange(query.shape[1])
    seen = places[None] <= places[:, None] if causal else torch.ones(len(places), len(places), dtype=torch.bool)
    if window is not None:
        seen = seen & (places[:, None] - places[None] < window)
    scores = (query @ key.transpose(-1, -2)) * softmax_scale
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value).transpose(0, 1)


@pytest.fixture
def calls(monkeypatch):
    """Put the stand-ins where transformers looks for flash-attn; note which of its functions was called."""
    noted = []

    def rows(query, key, value, **options):
        noted.append("rows")
        return torch.stack([attend(*one, **options) for one in zip(query, key, value, strict=True)])

    def documents(query, key, value, cu_seqlens_q, cu_seqlens_k, **options):
        noted.append("documents")
        assert torch.equal(cu_seqlens_q, cu_seqlens_k) and cu_seqlens_q.dtype == torch.int32
        assert options.pop("longest") == int(cu_seqlens_q.diff().max())
        sizes = cu_seqlens_q.diff().tolist()
        parts = (one.split(sizes) for one in (query, key, value))
        return torch.cat([attend(*one, **options) for one in zip(*parts, strict=True)])

    def options(is_causal, softmax_scale, sliding_window=None, max_seqlen_q=None, **rest):
        longest = {} if max_seqlen_q is None else {"longest": int(max_seqlen_q)}
        return {"causal": is_causal, "softmax_scale": softmax_scale, "window": sliding_window, **longest}

    stand_ins = ((rows, documents, None, None, None), (options, None))
    monkeypatch.setattr(flash, "lazy_import_flash_attention", lambda *_: stand_ins)
    return noted


def pair(family):
    """The same model twice, in float64: with flash_attention_2, and with scaled_dot_product_attention."""
    models = [tiny_model(family).double() for _ in range(2)]
    models[0].config._attn_implementation = FLASH
    return [backbone_of(model) for model in models]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize(
    ("lengths", "function"),
    [
        ([(5, 3, 8), (9, 7), (16,)], "documents"), ([(4, 9)], "documents"), ([(1, 1, 2)] * 2, "documents"),
        ([(16,), (16,)], "rows"), ([(12,)], "rows"),
    ],
)  # fmt: skip
def test_documents_stay_apart_in_rows_of_any_number(calls, family, lengths, function):
    with_flash, oracle = pair(family)
    positions = position_ids_from_lengths(lengths)
    ids = torch.randint(0, VOCABULARY, positions.shape)
    states = hidden_states(with_flash, ids, positions)
    torch.testing.assert_close(states, hidden_states(oracle, ids, positions), rtol=1e-9, atol=1e-9)
    assert calls == [function] * with_flash.config.num_hidden_layers


def test_without_the_boundaries_documents_of_several_rows_would_see_each_other(calls, monkeypatch):
    monkeypatch.setattr("disaggkd_cli.models.head.document_boundaries", lambda *_: {})
    with_flash, oracle = pair("llama")
    positions = position_ids_from_lengths([(5, 3), (4, 4)])
    ids = torch.randint(0, VOCABULARY, positions.shape)
    assert (hidden_states(with_flash, ids, positions) - hidden_states(oracle, ids, positions)).abs().max() > 1e-2


def test_other_kernels_are_given_nothing():
    assert document_boundaries(backbone_of(tiny_model("llama")), position_ids_from_lengths([(5, 3)])) == {}
