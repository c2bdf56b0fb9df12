"""Hidden states on disk: what a teacher answered, by what it was asked, in safetensors shards.

A recording is a directory: `states_00000.safetensors`, … and `recording.json`, which says what made it and which shards
belong to it. Shards are written aside, made durable and renamed, and the manifest is written after each, so an
interrupted recording goes on where its last shard ended. Nothing is pickled.

A request is found by a hash of its token ids, document boundaries and rows. So a recording serves every run that asks
for the same micro-batches, whatever its loss, learning rate or number of ranks.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from disaggkd_cli import files
from disaggkd_cli.errors import UserError

MANIFEST = "recording.json"
FORMAT = 1
SHARD_BYTES = 256 * 2**20


@dataclass(frozen=True)
class RecordingIdentity:
    """What a recording belongs to.

    Attributes:
        teacher: fingerprint of the teacher's configuration and weights.
        tokenizer: fingerprint of its tokenizer.
        hidden_size: H_t.
        dtype: a torch dtype's name, such as `bfloat16`.
    """

    teacher: str
    tokenizer: str
    hidden_size: int
    dtype: str


def request_key(input_ids: Tensor, document_lengths: Tensor, rows: Tensor) -> str:
    """Return the hash (hex) of a request: ids [B, S], flat document lengths [N] and rows [R]."""
    digest = hashlib.sha256(str(tuple(input_ids.shape)).encode())
    for tensor in (input_ids, document_lengths, rows):
        data = tensor.to(torch.int32).cpu().contiguous().numpy()
        digest.update(len(data.reshape(-1)).to_bytes(8, "little"))
        digest.update(memoryview(data.astype("<i4")))
    return digest.hexdigest()


class Recorder:
    """Appends answers to a recording, a shard at a time; also goes on with one that was interrupted.

    Args:
        directory: made if it is not there.
        identity: what is being recorded.
        shard_bytes: how much is gathered in memory before a shard is written.

    Raises:
        UserError: the directory holds a recording of something else, or one that is damaged.
    """

    def __init__(self, directory: Path, identity: RecordingIdentity, shard_bytes: int = SHARD_BYTES) -> None:
        self.directory = directory
        self.identity = identity
        self.shard_bytes = shard_bytes
        self.shards: list[str] = []
        self._pending: dict[str, Tensor] = {}
        self._bytes = 0
        self.keys: set[str] = set()
        directory.mkdir(parents=True, exist_ok=True)
        for aside in directory.glob(".*.writing"):
            aside.unlink()
        if (directory / MANIFEST).exists():
            before = Recording(directory, identity)
            self.shards = list(before.shards)
            self.keys = set(before.keys)

    def add(self, key: str, hidden: Tensor) -> None:
        """Record `hidden` [R, H_t] under `key`; it is on disk once `flush` has returned."""
        if key in self.keys:
            return
        self.keys.add(key)
        self._pending[key] = hidden.detach().to("cpu", getattr(torch, self.identity.dtype)).contiguous().clone()
        self._bytes += self._pending[key].nbytes
        if self._bytes >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what is pending as one shard."""
        if not self._pending:
            return
        name = f"states_{len(self.shards):05d}.safetensors"
        with files.replacing(self.directory / name, durable=True) as aside:
            save_file(self._pending, aside)
        self.shards.append(name)
        self._pending, self._bytes = {}, 0
        self._write_manifest()

    def _write_manifest(self) -> None:
        record = {"format": FORMAT, "identity": asdict(self.identity), "shards": self.shards}
        files.write_text(self.directory / MANIFEST, json.dumps(record, indent=1), durable=True)


class Recording:
    """Reads a recording; tensors come from mapped files, so memory stays small.

    Raises:
        UserError: there is none, it is damaged, or it was made of something else; the message names what differs.
    """

    def __init__(self, directory: Path, identity: RecordingIdentity) -> None:
        self.directory = directory
        manifest = _read_manifest(directory)
        differing = [
            f"{name.replace('_', ' ')} ({recorded} recorded, {asked} now)"
            for name, asked in asdict(identity).items()
            if (recorded := manifest["identity"].get(name)) != asked
        ]
        if differing:
            raise UserError(
                f"teacher.cache: {directory} was recorded from something else: {'; '.join(differing)}; "
                "record again, or go back to what it was recorded from"
            )
        self.shards: list[str] = manifest["shards"]
        self._where: dict[str, Any] = {}
        for name in self.shards:
            try:
                shard = safe_open(directory / Path(name).name, "pt")
                self._where |= dict.fromkeys(shard.keys(), shard)
            except (OSError, SafetensorError) as error:
                raise UserError(
                    f"teacher.cache: {directory / name} is missing or damaged ({error}); record again"
                ) from None

    @property
    def keys(self) -> list[str]:
        """The requests that it can answer."""
        return list(self._where)

    def hidden(self, key: str) -> Tensor | None:
        """Return the states [R, H_t] recorded under `key`, or None."""
        shard = self._where.get(key)
        return None if shard is None else shard.get_tensor(key)


def _read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise UserError(f"teacher.cache: {directory} has format {manifest['format']}; this version reads {FORMAT}")
        if not isinstance(manifest["identity"], dict) or not all(isinstance(name, str) for name in manifest["shards"]):
            raise ValueError("unexpected fields")
    except FileNotFoundError:
        raise UserError(f"teacher.cache: {directory} holds no recording ({MANIFEST} is not there)") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"teacher.cache: {path} is damaged ({type(error).__name__}: {error}); record again") from None
    return manifest
