"""Open files that may be compressed, by their ending."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from disaggkd_cli.errors import UserError

COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
_AT_ONCE = 1 << 20
_MAGIC = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"BZh": ".bz2"}


@contextmanager
def opened(path: Path, key: str, start: int = 0) -> Iterator[BinaryIO]:
    """The bytes of a file from `start` on, both as they are once decompressed.

    Raises:
        UserError: the file can't be read, is cut off, or is compressed though its ending does not say so.
    """
    kind = COMPRESSED.get(path.suffix.lower())
    try:
        if kind is None:
            with path.open("rb") as file:
                begin = file.read(4)
                for magic, ending in _MAGIC.items():
                    if begin.startswith(magic):
                        raise UserError(
                            f"{key}: {path} is compressed ({COMPRESSED[ending]}); its name must end in {ending}"
                        )
                file.seek(start)
                yield file
            return
        import pyarrow

        with pyarrow.input_stream(str(path), compression=kind) as stream:
            file = io.BufferedReader(stream, _AT_ONCE)
            while start > 0 and (skipped := len(file.read(min(start, _AT_ONCE)))):
                start -= skipped
            yield file
    except OSError as error:
        raise UserError(f"{key}: {path} can't be read ({error.strerror or error})") from error


def first_bytes(path: Path, key: str) -> bytes:
    """The first few bytes of a file, decompressed."""
    with opened(path, key) as file:
        return file.read(64)
