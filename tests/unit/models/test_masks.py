"""No mask of [S, S] is built unless documents share a row: attention goes to causal kernels, padded rows or not."""

import numpy as np
import pytest
import torch
import transformers.masking_utils as masking

from disaggkd_cli.data import IGNORE, Sequence, collate
from disaggkd_cli.models import backbone_of, requested_states
from disaggkd_cli.models.head import hidden_states
from tests.support.models import VOCABULARY, tiny_model

CPU = torch.device("cpu")
KEPT_BY_SDPA = ["llama", "qwen3", "gemma3_text"]  # each shorter here than the window of its local layers


def row(*lengths, seed):
    ids = np.random.default_rng(seed).integers(3, VOCABULARY, sum(lengths)).astype(np.int32)
    labels = np.append(ids[1:], IGNORE).astype(np.int32)
    labels[np.cumsum(lengths) - 1] = IGNORE
    return Sequence(ids, labels, lengths)


def batch_of(*rows):
    return collate([row(*lengths, seed=seed) for seed, lengths in enumerate(rows)], pad_id=0)


@pytest.fixture
def seen(monkeypatch):
    """What each call of the attention kernel was given: (mask, is_causal), and the masks that were built."""
    calls, masks = [], []
    kernel, make = torch.nn.functional.scaled_dot_product_attention, masking.sdpa_mask

    def watched(query, key, value, attn_mask=None, is_causal=False, **rest):
        calls.append((None if attn_mask is None else tuple(attn_mask.shape), is_causal))
        return kernel(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **rest)

    def built(*arguments, **rest):
        mask = make(*arguments, **rest)
        masks.extend([] if mask is None else [tuple(mask.shape)])
        return mask

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    monkeypatch.setitem(masking.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa", built)
    return calls, masks


@pytest.mark.parametrize("family", KEPT_BY_SDPA)
@pytest.mark.parametrize("rows", [((9,), (9,)), ((9,), (4,), (1,))], ids=["full", "padded"])
def test_one_document_a_row_is_causal_without_a_mask(seen, family, rows):
    calls, masks = seen
    backbone, batch = backbone_of(tiny_model(family)), batch_of(*rows)
    hidden_states(backbone, batch.input_ids, batch.position_ids)
    requested_states(backbone, batch.input_ids, batch.flat_document_lengths, batch.rows, CPU)
    assert calls == [(None, True)] * (2 * backbone.config.num_hidden_layers)
    assert masks == []


def test_documents_that_share_a_row_do_get_their_mask(seen):
    calls, masks = seen
    batch = batch_of((5, 4), (6,))
    hidden_states(backbone_of(tiny_model("llama")), batch.input_ids, batch.position_ids)
    assert masks == [(2, 1, 9, 9)] and all(call == ((2, 1, 9, 9), False) for call in calls)


@pytest.mark.parametrize(
    ("family", "tolerance"),
    [*((family, 1e-9) for family in KEPT_BY_SDPA), ("gemma2", 1e-4), ("gpt2", 1e-9), ("qwen3_5_text", 1e-4)],
)  # 1e-4 where transformers computes a part in float32 whatever the model's dtype; a leak shows in tenths
def test_a_padded_row_has_the_states_that_it_has_alone(family, tolerance):
    backbone = backbone_of(tiny_model(family)).double()
    batch = batch_of((23,), (8,), (17,))
    together = hidden_states(backbone, batch.input_ids, batch.position_ids)
    for index, length in enumerate(batch.row_lengths):
        ids = batch.input_ids[index : index + 1, :length]
        alone = hidden_states(backbone, ids, torch.arange(length)[None])[0]
        torch.testing.assert_close(together[index, :length], alone, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [((23,), (8,)), ((5, 3, 8), (4, 7), (2,))], ids=["padded", "packed and padded"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_student_and_teacher_have_the_same_bits_of_one_batch(family, rows):
    """The student takes positions from the batch, the teacher from the lengths that travel."""
    backbone, batch = backbone_of(tiny_model(family)), batch_of(*rows)
    states = hidden_states(backbone, batch.input_ids, batch.position_ids).flatten(0, 1)[batch.rows]
    asked = requested_states(backbone, batch.input_ids, batch.flat_document_lengths, batch.rows, CPU)
    assert torch.equal(states, asked)
