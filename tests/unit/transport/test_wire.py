"""Hidden states as bytes: sizes, round trips, checksum and finiteness in every wire dtype."""

import pytest
import torch

from disaggkd_cli.errors import UserError
from disaggkd_cli.transport.wire import (
    WIRE_DTYPES,
    decode_payload,
    encode_payload,
    payload_bytes,
    payload_checksum,
    payload_is_finite,
    wire_code,
)

SHAPES = [(0, 5), (1, 1), (3, 7), (195, 24)]
LOSS = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 0.0, "float8": 2**-4 + 2**-8}
"""Largest relative rounding error of a normal value: half a unit in the last place."""


def random_hidden(rows, width, seed=5):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("name", WIRE_DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_round_trip_is_as_exact_as_the_dtype(name, shape):
    hidden = random_hidden(*shape)
    buffer = torch.zeros(payload_bytes(*shape, name) + 3, dtype=torch.uint8)
    payload = encode_payload(hidden, name, buffer)
    assert payload.numel() == payload_bytes(*shape, name)
    back = decode_payload(payload, *shape, name)
    assert back.shape == hidden.shape
    slack = 1e-6 + (hidden.abs().amax(dim=1, keepdim=True) / 448 * 2**-10 if name == "float8" and shape[0] else 0)
    assert torch.all((back.float() - hidden).abs() <= LOSS[name] * hidden.abs() + slack)
    assert payload_is_finite(payload, *shape, name)


def test_a_16_bit_payload_is_decoded_as_a_view_of_its_slot():
    buffer = torch.zeros(64, dtype=torch.uint8)
    back = decode_payload(encode_payload(torch.ones(2, 4), "bfloat16", buffer), 2, 4, "bfloat16")
    assert back.data_ptr() == buffer.data_ptr() and back.dtype == torch.bfloat16


def test_float8_keeps_rows_of_very_different_size_apart():
    hidden = torch.tensor([[1e-6, -2e-6, 0.0], [1e6, 3e5, -1.0], [0.0, 0.0, 0.0]])
    payload = encode_payload(hidden, "float8", torch.zeros(payload_bytes(3, 3, "float8"), dtype=torch.uint8))
    back = decode_payload(payload, 3, 3, "float8").float()
    assert torch.allclose(back[0], hidden[0], rtol=0.07)
    assert torch.allclose(back[1, :2], hidden[1, :2], rtol=0.07)
    assert torch.equal(back[2], hidden[2])


@pytest.mark.parametrize("name", WIRE_DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_found_wherever_it_stands(name, bad):
    for position in (0, 33, 167):
        hidden = random_hidden(24, 7)
        hidden.view(-1)[position] = bad
        payload = encode_payload(hidden, name, torch.zeros(payload_bytes(24, 7, name), dtype=torch.uint8))
        assert not payload_is_finite(payload, 24, 7, name)


def test_finite_values_whose_sum_overflows_are_finite():
    payload = encode_payload(torch.full((2, 4), 3e38), "float32", torch.zeros(32, dtype=torch.uint8))
    assert payload_is_finite(payload, 2, 4, "float32")


def test_overflow_of_float16_is_found():
    payload = encode_payload(torch.full((1, 4), 1e6), "float16", torch.zeros(8, dtype=torch.uint8))
    assert not payload_is_finite(payload, 1, 4, "float16")


def test_checksum_sees_any_flipped_bit():
    payload = torch.randint(0, 256, (97,), dtype=torch.uint8)
    good = payload_checksum(payload)
    for bit in range(97 * 8):
        changed = payload.clone()
        changed[bit // 8] ^= 1 << (bit % 8)
        assert payload_checksum(changed) != good


def test_unknown_wire_dtype_names_the_key_and_the_choices():
    with pytest.raises(UserError, match="transport.dtype='int4'.*bfloat16"):
        wire_code("int4")


def test_a_tensor_that_has_the_wire_dtype_is_sent_from_where_it_lies():
    hidden = torch.ones(2, 4, dtype=torch.bfloat16)
    assert encode_payload(hidden, "bfloat16", torch.empty(0, dtype=torch.uint8)).data_ptr() == hidden.data_ptr()
    sliced = torch.ones(2, 8, dtype=torch.bfloat16)[:, ::2]
    buffer = torch.zeros(16, dtype=torch.uint8)
    assert encode_payload(sliced, "bfloat16", buffer).data_ptr() == buffer.data_ptr()
