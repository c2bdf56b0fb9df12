"""The wire format: what is written is read back, and what is damaged is refused."""

import ast
import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from disaggkd_cli.transport.errors import ProtocolError
from disaggkd_cli.transport.protocol import (
    HEADER_BYTES,
    Header,
    Kind,
    Request,
    StopReason,
    decode_request,
    hash_request_body,
    request_body,
    request_header,
    request_integers,
    run_number,
    stop_reason,
)

U16, U32, U64 = 2**16 - 1, 2**32 - 1, 2**64 - 1
WIDTHS = {"dtype": U16, "flags": U16}
WIDTHS |= {name: U64 for name in ("run", "ticket", "request_id", "token_hash", "body_bytes")}
FIELDS = [field.name for field in dataclasses.fields(Header) if field.name not in ("kind", "body_tag")]
headers = st.builds(
    Header,
    kind=st.sampled_from(Kind),
    body_tag=st.binary(min_size=16, max_size=16),
    **{name: st.integers(0, WIDTHS.get(name, U32)) for name in FIELDS},
)


def example_request(batch=2, sequence=5, rows=(0, 3, 9)):
    ids = torch.arange(batch * sequence, dtype=torch.int32).view(batch, sequence)
    lengths = torch.tensor([2, sequence - 2] * batch, dtype=torch.int32)
    return Request(7, ids, lengths, torch.tensor(rows, dtype=torch.int32))


@given(headers)
def test_header_round_trip(header):
    data = header.encode()
    assert len(data) == HEADER_BYTES
    assert Header.decode(data) == header


@given(headers, st.integers(0, HEADER_BYTES * 8 - 1))
def test_any_flipped_bit_in_a_header_is_refused(header, bit):
    data = bytearray(header.encode())
    data[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(ProtocolError):
        Header.decode(bytes(data))


def test_header_of_another_size_magic_or_kind_is_refused_by_name():
    data = Header(Kind.PING).encode()
    with pytest.raises(ProtocolError, match="127"):
        Header.decode(data[:-1])
    with pytest.raises(ProtocolError, match="not a disaggkd header"):
        Header.decode(b"HTTP" + data[4:])
    with pytest.raises(ProtocolError, match="protocol version 9"):
        Header.decode(data[:4] + (9).to_bytes(2, "little") + data[6:])
    with pytest.raises(ProtocolError, match="unknown message kind"):
        Header.decode(Header(77).encode())  # a future kind with a right checksum


@pytest.mark.parametrize("rows", [(), (0,), (9,), tuple(range(10))])
def test_request_round_trip(rows):
    request = example_request(rows=rows)
    body = request_body(request)
    header = request_header(request, body, ticket=3)
    assert request_integers(header) == body.numel()
    back = decode_request(header, body.clone())
    assert back.request_id == 7
    for name in ("input_ids", "document_lengths", "rows"):
        assert torch.equal(getattr(back, name), getattr(request, name))


def test_token_hash_sees_every_integer_and_the_shape():
    body = request_body(example_request())
    original = hash_request_body(body, 2, 5, 4)
    assert original == hash_request_body(body.clone(), 2, 5, 4)
    assert original != hash_request_body(body, 5, 2, 4)
    for position in range(body.numel()):
        changed = body.clone()
        changed[position] += 1
        assert hash_request_body(changed, 2, 5, 4) != original


def test_token_hash_is_the_same_on_every_machine_and_version():
    assert hash_request_body(request_body(example_request()), 2, 5, 4) == GOLDEN_HASH
    assert run_number("") == 0 and run_number("runs/quickstart") == GOLDEN_RUN


def test_damaged_request_body_is_refused():
    request = example_request()
    body = request_body(request)
    header = request_header(request, body, ticket=1)
    body[4] ^= 1
    with pytest.raises(ProtocolError, match="token hash"):
        decode_request(header, body)


def test_rows_and_lengths_out_of_range_are_refused_on_both_sides():
    with pytest.raises(ValueError, match="below 10"):
        request_body(example_request(rows=(10,)))
    with pytest.raises(ValueError, match="sum to 9"):
        request = example_request()
        request_body(dataclasses.replace(request, document_lengths=torch.tensor([2, 3, 4], dtype=torch.int32)))
    request = example_request()
    body = request_body(request)
    body[-1] = 10
    lying = dataclasses.replace(request_header(request, body, 1), token_hash=hash_request_body(body, 2, 5, 4))
    with pytest.raises(ProtocolError, match="outside"):
        decode_request(lying, body)


def test_a_header_that_announces_another_size_or_a_huge_request_is_refused_before_allocation():
    request = example_request()
    header = request_header(request, request_body(request), 1)
    with pytest.raises(ProtocolError):
        request_integers(dataclasses.replace(header, body_bytes=header.body_bytes + 4))
    with pytest.raises(ProtocolError):
        request_integers(dataclasses.replace(header, batch=2**31, sequence=2**31, body_bytes=2**40))


def test_unknown_stop_reason_is_a_protocol_error():
    assert stop_reason(Header(Kind.STOP, flags=StopReason.FINISHED)) is StopReason.FINISHED
    with pytest.raises(ProtocolError, match="99"):
        stop_reason(Header(Kind.STOP, flags=99))


GOLDEN_HASH = 3890494357525540339
GOLDEN_RUN = 174804302465847565


FOLDERS = [Path(__file__).parents[3] / "disaggkd_cli" / folder for folder in ("transport", "wire")]


@pytest.mark.parametrize(
    "path", [path for folder in FOLDERS for path in folder.glob("*.py")], ids=lambda path: path.stem
)
def test_every_public_function_says_what_it_does(path):
    def silent(node):
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.ClassDef | ast.FunctionDef) and not inner.name.startswith("_"):
                if ast.get_docstring(inner) is None:
                    yield inner.name
                if isinstance(inner, ast.ClassDef):
                    yield from silent(inner)

    assert list(silent(ast.parse(path.read_text()))) == []
