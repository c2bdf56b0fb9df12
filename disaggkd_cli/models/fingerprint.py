"""A fingerprint that tells two models apart without reading hundreds of gigabytes."""

from __future__ import annotations

import hashlib
from pathlib import Path

from disaggkd_cli.models.load import ModelSource

_PIECES = 256
_PIECE_BYTES = 64 * 1024
_WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin")


def model_fingerprint(source: ModelSource) -> str:
    """Return a sha256 over a model's configuration and its weights.

    Of each weight file it takes the size and 256 evenly spaced pieces of 64 KiB, which covers files up to 16 MiB
    wholly and catches any retraining of larger ones. A hub name is looked up in the local hub cache.
    """
    digest = hashlib.sha256()
    for path in _model_files(source):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as file:
            if size <= _PIECES * _PIECE_BYTES:
                digest.update(file.read())
                continue
            for piece in range(_PIECES):
                file.seek(piece * (size - _PIECE_BYTES) // (_PIECES - 1))
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()


def _model_files(source: ModelSource) -> list[Path]:
    directory = source.directory or _hub_snapshot(source.name)
    if source.gguf_file:
        return [directory / source.gguf_file]
    files = [path for path in directory.iterdir() if path.suffix in _WEIGHT_SUFFIXES or path.name == "config.json"]
    return sorted(files, key=lambda path: path.name)


def _hub_snapshot(name: str) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, local_files_only=True, allow_patterns=["config.json", "*.safetensors"]))
