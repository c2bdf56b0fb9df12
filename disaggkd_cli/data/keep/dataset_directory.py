"""A laid-out dataset on disk: its arrays as flat files that ranks and runs map, so that memory holds them once.

NAME.bin        one per array of TokenizedDataset
manifest.json   dtype, size and checksum of each, fingerprint and notes; written last
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from disaggkd_cli import files
from disaggkd_cli.data.keep.shards import crc_of_range
from disaggkd_cli.data.layout.dataset import ARRAYS, TokenizedDataset

_DTYPES = {"int32": "<i4", "int64": "<i8"}


class DatasetDirectory:
    """One split's directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def allocate(self, name: str, size: int, dtype: Any) -> np.ndarray:
        """A flat array in a file, whose room on the disk is taken at once: a full disk is told here, not when the
        array is written to (which would end the process with a bus error)."""
        self.directory.mkdir(parents=True, exist_ok=True)
        little = np.dtype(_DTYPES[np.dtype(dtype).name])
        if size == 0:
            self._path(name).touch()
            return np.empty(0, little)
        with self._path(name).open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, size * little.itemsize)
        return np.memmap(self._path(name), little, "r+", shape=(size,)).view(np.ndarray)

    def seal(self, dataset: TokenizedDataset) -> None:
        """Write the manifest of a dataset whose arrays were allocated here."""
        arrays = {}
        for name in ARRAYS:
            array = getattr(dataset, name)
            with self._path(name).open("r+b") as file:
                os.fsync(file.fileno())
                checksum = crc_of_range(file, 0, array.nbytes)
            arrays[name] = {"dtype": array.dtype.name, "size": len(array), "checksum": checksum}
        manifest = {
            "arrays": arrays,
            "fingerprint": dataset.fingerprint,
            "notes": dataset.notes,
            "source_sizes": dataset.source_sizes,
            "weights": dataset.weights,
            "names": dataset.names,
            "length_bucketing": dataset.length_bucketing,
        }
        files.write_text(self.directory / "manifest.json", json.dumps(manifest), durable=True)

    def damage(self) -> str | None:
        """What is wrong with the files; None: nothing."""
        try:
            manifest = json.loads((self.directory / "manifest.json").read_text())
            for name in ARRAYS:
                facts = manifest["arrays"][name]
                size = facts["size"] * np.dtype(_DTYPES[facts["dtype"]]).itemsize
                with self._path(name).open("rb") as file:
                    if os.fstat(file.fileno()).st_size != size:
                        return f"{self._path(name).name} has another size than its manifest says"
                    if crc_of_range(file, 0, size) != facts["checksum"]:
                        return f"{self._path(name).name} differs from its checksum"
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"its manifest can't be read ({type(error).__name__}: {error})"
        return None

    def open(self) -> TokenizedDataset:
        """The dataset, mapped."""
        manifest = json.loads((self.directory / "manifest.json").read_text())
        arrays = {name: self._map(name, manifest["arrays"][name]) for name in ARRAYS}
        return TokenizedDataset(
            **arrays,
            fingerprint=manifest["fingerprint"],
            notes=manifest["notes"],
            source_sizes=tuple(manifest["source_sizes"]),
            weights=tuple(manifest["weights"]),
            names=tuple(manifest["names"]),
            length_bucketing=manifest["length_bucketing"],
        )

    def _path(self, name: str) -> Path:
        return self.directory / f"{name}.bin"

    def _map(self, name: str, facts: dict[str, Any]) -> np.ndarray:
        if not facts["size"]:
            return np.empty(0, facts["dtype"])
        return np.memmap(self._path(name), _DTYPES[facts["dtype"]], "r", shape=(facts["size"],)).view(np.ndarray)


def with_notes(dataset: TokenizedDataset, notes: list[str]) -> TokenizedDataset:
    """The same dataset with further notes before its own."""
    return replace(dataset, notes=[*notes, *dataset.notes])
