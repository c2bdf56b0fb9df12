"""What travels: the wire formats of hidden states, one entry each.

Everything that depends on `transport.dtype` asks here: the configuration (which names there are), the planner (bytes a
row), both sides of a link (encode, decode, verify), recordings and checks. A new format is a file like `float8.py`, a
line below, and a test. Importing this costs no torch.
"""

from __future__ import annotations

from disaggkd_cli.errors import UserError
from disaggkd_cli.wire.float8 import ScaledFloat8
from disaggkd_cli.wire.format import WireFormat
from disaggkd_cli.wire.plain import Plain

__all__ = ["FORMATS", "WireFormat", "format_of", "format_of_code"]

FORMATS: dict[str, WireFormat] = {
    entry.name: entry
    for entry in (
        Plain("bfloat16", code=1, element_bytes=2),
        Plain("float16", code=2, element_bytes=2),
        Plain("float32", code=3, element_bytes=4),
        ScaledFloat8("float8", code=4),
    )
}
"""By the name that `transport.dtype` takes. A code is never given to another format."""

_BY_CODE = {entry.code: entry for entry in FORMATS.values()}


def format_of(name: str) -> WireFormat:
    """Return the format of this name.

    Raises:
        UserError: there is none.
    """
    if name not in FORMATS:
        raise UserError(f"transport.dtype={name!r} is not a wire dtype; choose one of {', '.join(FORMATS)}")
    return FORMATS[name]


def format_of_code(code: int) -> WireFormat:
    """Return the format that headers name by this number, which has been checked."""
    return _BY_CODE[code]
