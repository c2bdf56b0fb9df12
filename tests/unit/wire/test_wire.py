"""Hidden states as bytes: sizes, round trips and finiteness in every wire format."""

import subprocess
import sys

import pytest
import torch

from disaggkd_cli.errors import UserError
from disaggkd_cli.transport.checksum import payload_checksum
from disaggkd_cli.wire import FORMATS, format_of, format_of_code

SHAPES = [(0, 5), (1, 1), (3, 7), (195, 24)]
LOSS = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 0.0, "float8": 2**-4 + 2**-8}
"""Largest relative rounding error of a normal value: half a unit in the last place."""


def random_hidden(rows, width, seed=5):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_round_trip_is_as_exact_as_the_dtype(name, shape):
    hidden = random_hidden(*shape)
    wire = format_of(name)
    buffer = torch.zeros(wire.payload_bytes(*shape) + 3, dtype=torch.uint8)
    payload = wire.payload_of(hidden, buffer)
    assert payload.numel() == wire.payload_bytes(*shape) == shape[0] * wire.bytes_per_row(shape[1])
    back = wire.decode(payload, *shape)
    assert back.dtype == wire.compute_dtype()
    assert not wire.is_exact or torch.equal(back, hidden.to(back.dtype))
    assert (back.float() - hidden).norm() <= max(wire.tolerance, LOSS[name]) * hidden.norm()
    assert back.shape == hidden.shape
    slack = 1e-6 + (hidden.abs().amax(dim=1, keepdim=True) / 448 * 2**-10 if name == "float8" and shape[0] else 0)
    assert torch.all((back.float() - hidden).abs() <= LOSS[name] * hidden.abs() + slack)
    assert wire.is_finite(payload, *shape)


def test_a_16_bit_payload_is_decoded_as_a_view_of_its_slot():
    buffer = torch.zeros(64, dtype=torch.uint8)
    back = format_of("bfloat16").decode(format_of("bfloat16").payload_of(torch.ones(2, 4), buffer), 2, 4)
    assert back.data_ptr() == buffer.data_ptr() and back.dtype == torch.bfloat16


def test_float8_keeps_rows_of_very_different_size_apart():
    hidden = torch.tensor([[1e-6, -2e-6, 0.0], [1e6, 3e5, -1.0], [0.0, 0.0, 0.0]])
    payload = format_of("float8").payload_of(
        hidden, torch.zeros(format_of("float8").payload_bytes(3, 3), dtype=torch.uint8)
    )
    back = format_of("float8").decode(payload, 3, 3).float()
    assert torch.allclose(back[0], hidden[0], rtol=0.07)
    assert torch.allclose(back[1, :2], hidden[1, :2], rtol=0.07)
    assert torch.equal(back[2], hidden[2])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_found_wherever_it_stands(name, bad):
    for position in (0, 33, 167):
        hidden = random_hidden(24, 7)
        hidden.view(-1)[position] = bad
        payload = format_of(name).payload_of(
            hidden, torch.zeros(format_of(name).payload_bytes(24, 7), dtype=torch.uint8)
        )
        assert not format_of(name).is_finite(payload, 24, 7)


def test_finite_values_whose_sum_overflows_are_finite():
    payload = format_of("float32").payload_of(torch.full((2, 4), 3e38), torch.zeros(32, dtype=torch.uint8))
    assert format_of("float32").is_finite(payload, 2, 4)


def test_overflow_of_float16_is_found():
    payload = format_of("float16").payload_of(torch.full((1, 4), 1e6), torch.zeros(8, dtype=torch.uint8))
    assert not format_of("float16").is_finite(payload, 1, 4)


def test_checksum_sees_any_flipped_bit():
    payload = torch.randint(0, 256, (97,), dtype=torch.uint8)
    good = payload_checksum(payload)
    for bit in range(97 * 8):
        changed = payload.clone()
        changed[bit // 8] ^= 1 << (bit % 8)
        assert payload_checksum(changed) != good


def test_unknown_wire_dtype_names_the_key_and_the_choices():
    with pytest.raises(UserError, match="transport.dtype='int4'.*bfloat16"):
        format_of("int4")


def test_a_tensor_that_has_the_wire_dtype_is_sent_from_where_it_lies():
    hidden = torch.ones(2, 4, dtype=torch.bfloat16)
    assert format_of("bfloat16").payload_of(hidden, torch.empty(0, dtype=torch.uint8)).data_ptr() == hidden.data_ptr()
    sliced = torch.ones(2, 8, dtype=torch.bfloat16)[:, ::2]
    buffer = torch.zeros(16, dtype=torch.uint8)
    assert format_of("bfloat16").payload_of(sliced, buffer).data_ptr() == buffer.data_ptr()


def test_codes_stay_what_they_are_and_belong_to_one_format_each():
    codes = {name: entry.code for name, entry in FORMATS.items()}
    assert codes | {"bfloat16": 1, "float16": 2, "float32": 3, "float8": 4} == codes, "peers of this version read these"
    assert len(set(codes.values())) == len(codes)
    assert all(format_of_code(entry.code) is entry and entry.name == name for name, entry in FORMATS.items())


def test_sizes_cost_no_torch():
    code = "import sys; from disaggkd_cli.wire import FORMATS; [f.payload_bytes(2, 8) for f in FORMATS.values()]"
    assert subprocess.run([sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)"]).returncode == 0
