"""Sizes as people write and read them. Binary prefixes are powers of 1024, decimal ones powers of 1000."""

from __future__ import annotations

import re
import unicodedata

from disaggkd_cli.errors import UserError

_FACTORS = {
    "": 1, "B": 1,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Return the number of bytes that `text` means: `"256MiB"`, `"1.5 GiB"`, `"4096"` or a plain integer.

    Raises:
        UserError: when it is no size.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.fullmatch(str(text))
    factor = _FACTORS.get(match.group(2).upper()) if match else None
    if match is None or factor is None:
        raise UserError(f"{text!r} is not a size; write it like 256MiB, 2GiB or a number of bytes")
    return round(float(match.group(1)) * factor)


def format_bytes(count: float) -> str:
    """Return `count` bytes in the largest binary unit that keeps the number at or above one."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """Return a duration as `8.3 s`, `2 min 05 s` or `3 h 07 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def printable(text: str) -> str:
    """Return `text` with whatever could steer a terminal or reorder a line spelled out: control characters but
    newlines and tabs, and Unicode's own controls and direction marks."""
    if text.isprintable():
        return text
    return "".join(one if one in "\n\t" or not _steers(one) else _spelled(one) for one in text)


def _spelled(character: str) -> str:
    return character.encode("unicode_escape").decode()


def _steers(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
