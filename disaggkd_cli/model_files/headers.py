"""What tensors a directory's safetensors files hold, from their headers alone: names, shapes, bytes. No torch."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from disaggkd_cli.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_LONGEST_HEADER = 100_000_000
"""Bytes; the limit of the format itself."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor on disk.

    Attributes:
        file: that holds it.
        shape: its sizes.
        dtype: as safetensors name it, such as `BF16`.
        bytes: it takes in the file.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    bytes: int


def tensor_files(directory: Path) -> dict[str, Path]:
    """Return the file of each tensor of a model directory by name; empty where there are no safetensors files.

    Raises:
        UserError: the index is damaged, or names a file outside of the directory.
    """
    index = directory / INDEX
    if not index.is_file():
        return {name: one.file for name, one in file_entries(directory / SINGLE).items()} if _single(directory) else {}
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ValueError("weight_map must map names of tensors to names of files")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{index}: is damaged ({type(error).__name__}: {error}); copy or download it again") from None
    for file in set(weight_map.values()):
        path = PurePosixPath(file.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or not path.name:
            raise UserError(
                f"{index}: names {file!r}, which lies outside of its directory; weights are read from beside their "
                "index only: download the model again"
            )
    return {name: directory / file for name, file in weight_map.items()}


def tensor_entries(directory: Path) -> dict[str, TensorEntry]:
    """Return every tensor of a model directory's safetensors files by name; empty where there are none.

    Raises:
        UserError: a file is missing or damaged, or an index lies (see `tensor_files`).
    """
    files = tensor_files(directory)
    entries: dict[str, TensorEntry] = {}
    for file in sorted(set(files.values())):
        if not file.is_file():
            raise UserError(f"{directory / INDEX}: names {file.name}, which is not there; copy or download it again")
        entries |= file_entries(file)
    return entries


def file_entries(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of one safetensors file by name.

    Raises:
        UserError: its header does not fit the file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(_LONGEST_HEADER, size - 8):
                raise ValueError(f"a header of {length:,} bytes in a file of {size:,}")
            header = json.loads(file.read(length))
        entries = {name: _entry(path, one) for name, one in header.items() if name != "__metadata__"}
        end = max((one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"), default=0)
        if 8 + length + end != size:
            raise ValueError(f"it has {size:,} bytes, and its header describes {8 + length + end:,}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError) as error:
        raise UserError(f"{path}: is damaged: {' '.join(str(error).split())}; copy or download it again") from None
    return entries


def _entry(path: Path, described: dict[str, Any]) -> TensorEntry:
    begin, end = described["data_offsets"]
    shape = tuple(described["shape"])
    if not all(isinstance(size, int) and size >= 0 for size in (*shape, begin, end)) or end < begin:
        raise ValueError(f"a tensor of shape {shape} at bytes {begin} to {end}")
    return TensorEntry(path, shape, described["dtype"], end - begin)


def _single(directory: Path) -> bool:
    return (directory / SINGLE).is_file()
