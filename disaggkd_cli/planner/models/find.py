"""Find a model's shape: a `config.json`, a model directory, a hub cache entry, or a preset shipped with the package."""

from __future__ import annotations

import difflib
import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from disaggkd_cli.errors import UserError
from disaggkd_cli.layouts import tensor_plan
from disaggkd_cli.model_files import read_model_config, verify_model_directory
from disaggkd_cli.planner.models.families import is_known, model_shape, text_model_type
from disaggkd_cli.planner.models.shapes import ModelShape

PRESETS = Path(__file__).with_name("presets")


def preset_names() -> list[str]:
    """Names of the presets, such as `qwen3-8b`."""
    return sorted(path.stem for path in PRESETS.glob("*.json"))


def load_preset(name: str) -> dict[str, Any]:
    """The preset's file: `hub_names`, `source`, and `config`, the fields of its config.json that decide its shape."""
    return json.loads((PRESETS / f"{name}.json").read_text(encoding="utf-8"))


def resolve_model(model: str, key: str) -> ModelShape:
    """Return the shape of `model`: a path (also of a GGUF file), a hub name (in the local cache, or of a preset),
    or a preset's name.

    Local files win over presets, so that an edited config.json is what is planned.

    Raises:
        UserError: naming `key`, with the nearest presets, when nothing is found or the file cannot be understood.
    """
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        return _shape_of(gguf_fields(model, key), model, model, key)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise UserError(f"{key}: {model} is a directory without a config.json")
    if path.is_file():
        return _from_file(path, model, key)
    cached = _hub_cache_config(model)
    if cached is not None:
        return _from_file(cached, model, key)
    preset = _preset_of(model)
    if preset is not None:
        entry = load_preset(preset)
        return model_shape(entry["config"], preset, f"preset {preset}: {entry['source']}")
    known = [*preset_names(), *_hub_names()]
    folded = {name.lower(): name for name in known}
    near = [folded[match] for match in difflib.get_close_matches(model.lower(), list(folded), n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"presets are {', '.join(preset_names())}"
    raise UserError(
        f"{key}: {model!r} is no file, no entry of the local hub cache and no preset; {hint} "
        "(or give a model directory or its config.json: the planner downloads nothing)"
    )


def _from_file(path: Path, name: str, key: str) -> ModelShape:
    config = read_model_config(path, key)
    verify_model_directory(str(path), key)
    return _shape_of(config, name, str(path), key)


def _shape_of(config: dict[str, Any], name: str, source: str, key: str) -> ModelShape:
    """The shape of a parsed config.json; `source` is where it was read from."""
    model_type = text_model_type(config)
    if not is_known(model_type) and tensor_plan(model_type) is not None:
        from disaggkd_cli.planner.models.built import built_shape  # imports torch

        return built_shape(config, name, source, key)
    try:
        return model_shape(config, name, source)
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise UserError(
            f"{key}: {source} cannot be understood ({type(error).__name__}: {' '.join(str(error).split())}); take the "
            "config.json that belongs to the model's weights"
        ) from None


def gguf_fields(model: str, key: str) -> dict[str, Any]:
    """The fields of the config that transformers makes of a GGUF file's header, as a run makes it (imports torch).

    Raises:
        UserError: there is no such file, or it cannot be read.
    """
    path = Path(model).expanduser()
    if not path.is_file():
        raise UserError(f"{key}: {model}: there is no such file")
    return json.loads(_gguf_config(str(path), key, path.stat().st_mtime_ns))


@lru_cache(maxsize=16)
def _gguf_config(path: str, key: str, changed: int) -> str:
    """As JSON, which nobody can change for the next; `changed` tells one state of the file from another."""
    from disaggkd_cli.models.load import load_config, resolve_source

    return load_config(resolve_source(path), key).to_json_string(use_diff=False)


def _hub_cache_config(model: str) -> Path | None:
    """The config.json of the newest snapshot of `model` in the local Hugging Face cache, if it is there."""
    if model.count("/") != 1:
        return None
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    snapshots = list((cache / f"models--{model.replace('/', '--')}" / "snapshots").glob("*/config.json"))
    return max(snapshots, key=lambda path: path.stat().st_mtime, default=None)


@lru_cache(maxsize=1)
def _hub_names() -> dict[str, str]:
    return {hub: name for name in preset_names() for hub in load_preset(name)["hub_names"]}


def _preset_of(model: str) -> str | None:
    folded = model.lower()
    if folded in preset_names():
        return folded
    return {hub.lower(): name for hub, name in _hub_names().items()}.get(folded)


def local_fields(model: str) -> dict[str, Any] | None:
    """The fields of a model's config.json as far as they are known without a download; None where they are not.

    A directory, a file, an entry of the local hub cache, or a preset's hub name.
    """
    path = Path(model).expanduser()
    path = path / "config.json" if path.is_dir() else path
    file = path if path.is_file() and path.suffix == ".json" else _hub_cache_config(model)
    try:
        if file is not None:
            return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    preset = _preset_of(model)
    return None if preset is None else load_preset(preset)["config"]


def hub_config(model: str, key: str) -> dict[str, Any]:
    """The fields of a model's config.json: of the file (or a GGUF file's header), the hub cache's, or the preset's.

    Raises:
        UserError: when nothing is found.
    """
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        return gguf_fields(model, key)
    path = path / "config.json" if path.is_dir() else path
    file = path if path.is_file() else _hub_cache_config(model)
    if file is not None:
        return json.loads(file.read_text(encoding="utf-8"))
    preset = _preset_of(model)
    if preset is None:
        raise UserError(f"{key}: {model!r} is no file, no entry of the local hub cache and no preset")
    return load_preset(preset)["config"]
