"""Sizes as people write and read them."""

import pytest

from disaggkd_cli.errors import UserError
from disaggkd_cli.units import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [("256MiB", 2**28), ("1.5 GiB", 3 * 2**29), ("4096", 4096), (4096, 4096), ("2GB", 2 * 10**9), ("1kib", 1024)],
)
def test_sizes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "MiB", "1 apple", "-1MiB", "1e3", None, True])
def test_what_is_no_size(text):
    with pytest.raises(UserError, match="is not a size"):
        parse_bytes(text)


def test_readable_forms():
    assert format_bytes(3 * 2**29) == "1.50 GiB"
    assert format_bytes(12) == "12 B"
    assert format_seconds(8.34) == "8.3 s"
    assert format_seconds(125) == "2 min 05 s"
    assert format_seconds(3 * 3600 + 7 * 60) == "3 h 07 min"
