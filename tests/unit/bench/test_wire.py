"""What a wire format does to the loss is measured, and is as small as its precision promises."""

import pytest

from disaggkd_cli.bench.wire import bench_wire, format_wire_rows


@pytest.fixture(scope="module")
def rows():
    return bench_wire()


def errors(rows, name):
    return [row["gradient_error"] for row in rows if row["dtype"] == name]


def test_float32_changes_nothing(rows):
    assert errors(rows, "float32") == [0.0, 0.0]


def test_more_bits_are_more_exact(rows):
    for one in range(2):
        exactness = [errors(rows, name)[one] for name in ("float16", "bfloat16", "float8")]
        assert exactness == sorted(exactness)
        assert 0 < exactness[0] < exactness[1] < 0.1


def test_bytes_on_the_wire(rows):
    assert {row["dtype"]: row["bytes_per_row"] for row in rows} == {
        "bfloat16": 1024, "float16": 1024, "float32": 2048, "float8": 516,
    }  # fmt: skip


def test_the_table_has_every_row(rows):
    assert len(format_wire_rows(rows).splitlines()) == 2 + len(rows)
