"""Saved activations: the traced figures of the literature, exactly, and every term by hand."""

from __future__ import annotations

import pytest

from disaggkd_cli.planner.memory.attention import forward_score_bytes, mask_bytes
from disaggkd_cli.planner.memory.layer_tensors import checkpointed_per_token, forward_working_set, saved_per_token
from disaggkd_cli.planner.models import resolve_model
from disaggkd_cli.planner.models.shapes import DenseMLP, ExpertMLP, GatedDeltaNet, LayerShape
from disaggkd_cli.planner.terms import total

from .planner_toys import toy_model


def saved(layer, hidden, b, sequence=2048, **options):
    return total(saved_per_token(layer, hidden, b, sequence, **options))


@pytest.mark.parametrize(("name", "expected"), [("llama-3.1-8b", 217_224), ("qwen3-8b", 231_720)])
def test_traced_layers_exactly(name, expected):
    # FSDPMemTracker, bfloat16, S = 2048, with the mask that packed rows get.
    shape = resolve_model(name, "test")
    assert saved(shape.layers[0], shape.hidden, 2, packed=True) == expected


def test_dense_layer_by_hand():
    layer = toy_model().layers[0]
    norms, attention, mlp = 2 * (8 * 8 + 4), 2 * (2 * 8 + 2 * 4) + 4 * 2, 4 * 2 * 16
    assert saved(layer, 8, 2) == norms + attention + mlp
    float32 = 2 * (12 * 8 + 4) + 4 * (2 * 8 + 2 * 4) + 4 * 2 + 4 * 4 * 16
    assert saved(layer, 8, 4) == float32


def test_a_mask_repeats_keys_and_values_and_is_kept_itself():
    layer = toy_model().layers[0]
    assert saved(layer, 8, 2, sequence=100, packed=True) - saved(layer, 8, 2) == 2 * (4 * 8 + 100) - 2 * (2 * 8 + 2 * 4)


def test_a_window_shorter_than_the_sequence_is_a_mask():
    shape = resolve_model("gemma-3-4b", "test")
    sliding = shape.layers[0]
    assert saved(sliding, 2560, 2, sequence=1023) < saved(sliding, 2560, 2, sequence=1024)


def test_experts_by_hand():
    layer = LayerShape(toy_model().layers[0].mixer, ExpertMLP(experts=6, top_k=2, width=4))
    dense = LayerShape(toy_model().layers[0].mixer, DenseMLP(0))
    assert saved(layer, 8, 2) - saved(dense, 8, 2) == 2 * 2 * (2 * 8 + 4 * 4) + 4 * 6 + 24 * 2


def test_delta_net_by_hand():
    layer = LayerShape(GatedDeltaNet(2, 4, 3, 5, 4), DenseMLP(0))
    norms = 2 * (8 * 10 + 4)
    # K = 6, Vd = 20, n = 4: 2 b (2 K + Vd) + 3 b Vd + (8 + 64 b) n
    assert saved(layer, 10, 2) - norms == 4 * 32 + 6 * 20 + 136 * 4


def test_torch_delta_net_takes_far_more_than_the_kernel():
    shape = resolve_model("qwen3.5-9b", "test")
    layer = shape.layers[0]
    ratio = saved(layer, 4096, 2, delta_kernel="torch") / saved(layer, 4096, 2)
    assert 2 < ratio < 5


def test_checkpointing_keeps_the_input_only():
    assert checkpointed_per_token(8, 2).value == 16


def test_forward_working_set_takes_the_wider_half():
    # MLP half: 2 (4*8 + 3*16) = 160; attention half: 2 (3*8 + 3*8 + 2*4) = 112; norms 12*8 = 96.
    assert forward_working_set(toy_model().layers[0], 8, 2).value == 160


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "attention", "packed", "length"),
    [
        ("qwen3-0.6b", "auto", False, 1024),
        ("qwen3-0.6b", "auto", True, 1024),
        ("qwen3-0.6b", "eager", False, 1024),
        ("gemma-2-2b", "auto", False, 2048),
        ("gpt-oss-20b", "auto", False, 4096),
        ("gemma-3-1b", "eager", False, 4096),
        ("mixtral-8x7b", "auto", False, 256),
        ("qwen3-30b-a3b", "auto", False, 256),
    ],
)
def test_a_teachers_forward_against_a_trace(name, attention, packed, length):
    """Weights apart, the peak of a forward without gradients: kernels keep no scores, eager attention S² of them."""
    from .planner_tracing import forward_peak

    shape = resolve_model(name, "test")
    # What no term counts: rotary tables, position ids, a router's scores.
    traced = forward_peak(name, attention, length, packed=packed)
    masks = mask_bytes(shape.layer_kinds(), length, packed, attention, 2)
    widest = max(
        forward_working_set(layer, shape.hidden, 2, length, attention=attention).value for layer in shape.layer_kinds()
    )
    assert (widest + masks * length) * length == pytest.approx(traced, rel=0.025)


def test_the_scores_of_known_teachers():
    """Measured with real tensors: 10.3 and 6.3 bytes a head and pair of tokens with masks, at 8,192 and 16,384."""
    for name, length, heads, measured in (("gemma-2-27b", 8192, 32, 10.3), ("gpt-oss-20b", 16384, 64, 6.3)):
        shape = resolve_model(name, "test")
        scores = forward_score_bytes(shape.layers[0].mixer, "auto", 2) * heads
        per_head = (scores + mask_bytes(shape.layer_kinds(), length, False, "auto", 2)) / heads
        assert per_head == pytest.approx(measured, rel=0.04)
    assert mask_bytes(resolve_model("qwen3-32b", "test").layers, 131_072, True, "auto", 2) == 3
    assert mask_bytes(resolve_model("qwen3-32b", "test").layers, 131_072, False, "auto", 2) == 0
    for name in ("flash_attention_2", "flash_attention_3", "flex_attention"):
        assert mask_bytes(resolve_model("qwen3-32b", "test").layers, 131_072, True, name, 2) == 0
        assert mask_bytes(resolve_model("gemma-2-27b", "test").layers, 8192, True, name, 2) == 0
    sinks = resolve_model("gpt-oss-20b", "test").layers
    assert mask_bytes(sinks, 8192, True, "flash_attention_2", 2) == mask_bytes(sinks, 8192, True, "eager", 2) > 0
    assert mask_bytes(sinks, 8192, True, "flex_attention", 2) == 0


def test_packed_rows_cost_no_memory_for_masks_with_kernels_that_need_none():
    """32 query heads and 8 of keys and values share them; flex copies them for 40, which is no power of two."""
    for name, copied in (("qwen3-8b", False), ("qwen3-14b", True)):
        shape = resolve_model(name, "test")
        packed = {
            kernels: saved(shape.layers[1], shape.hidden, 2, sequence=4096, packed=True, attention=kernels)
            for kernels in ("sdpa", "flash_attention_2", "flex_attention")
        }
        alone = saved(shape.layers[1], shape.hidden, 2, sequence=4096, packed=False, attention="sdpa")
        mixer = shape.layers[1].mixer
        copies = 2 * (2 * mixer.q - 2 * mixer.kv)
        assert packed["flash_attention_2"] == alone
        assert packed["flex_attention"] == alone + copied * copies
        assert packed["sdpa"] == alone + copies + 2 * 4096


@pytest.mark.parametrize("name", ["gemma-2-2b", "qwen3-0.6b"])
def test_eager_students_against_autograd(name):
    from .planner_tracing import saved_by_autograd

    shape = resolve_model(name, "test")
    traced = saved_by_autograd(name, 2, 256, "eager") - saved_by_autograd(name, 1, 256, "eager")
    predicted = saved(shape.layers[1], shape.hidden, 2, sequence=256, attention="eager")
    assert traced / 256 == pytest.approx(predicted, rel=0.005)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("name", "band"), [("qwen3-0.6b", 0.0), ("qwen3-30b-a3b", 0.002), ("qwen3.5-9b", 0.002)])
def test_layers_against_autograd(name, band):
    """What autograd saves in one more layer of the first kind, on fake tensors."""
    from .planner_tracing import saved_by_autograd

    shape = resolve_model(name, "test")
    traced = saved_by_autograd(name, 2, 256) - saved_by_autograd(name, 1, 256)
    predicted = saved(shape.layers[1], shape.hidden, 2, sequence=256, delta_kernel="torch")
    assert traced / 256 == pytest.approx(predicted, rel=band, abs=0.5 if band == 0 else None)
