"""Load a causal language model, its configuration, or its head alone, from a directory, a GGUF file or a hub name."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from disaggkd_cli.config import Config
from disaggkd_cli.errors import UserError
from disaggkd_cli.losses import Head
from disaggkd_cli.model_files import TensorEntry, tensor_entries
from disaggkd_cli.models.head import head_of, head_semantics, verify_split
from disaggkd_cli.models.kernels import choose_kernels_by_device
from disaggkd_cli.models.tensors import odd_tensors, verify_tensors
from disaggkd_cli.models.values import verify_head_values

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from, in the words that `from_pretrained` understands.

    Attributes:
        name: a directory or a hub name.
        gguf_file: the file's name in that directory, for GGUF models.
        trust_remote_code: let the model's own Python code run.
    """

    name: str
    gguf_file: str | None = None
    trust_remote_code: bool = False

    @property
    def directory(self) -> Path | None:
        """The local directory, or None for a hub name."""
        path = Path(self.name)
        return path if path.is_dir() else None

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments common to transformers' `from_pretrained` methods."""
        arguments: dict[str, Any] = {"trust_remote_code": self.trust_remote_code}
        if self.gguf_file:
            arguments["gguf_file"] = self.gguf_file
        return arguments


def resolve_source(model: str, *, trust_remote_code: bool = False) -> ModelSource:
    """Return where `model` (a directory, a GGUF file, a `config.json`, or a hub name) is to be read from."""
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        return ModelSource(str(path.parent), path.name, trust_remote_code)
    if path.name == "config.json" and path.is_file():
        return ModelSource(str(path.parent), None, trust_remote_code)
    return ModelSource(str(path) if path.exists() else model, None, trust_remote_code)


def teacher_source(config: Config) -> ModelSource:
    """Return where a run's teacher is to be read from."""
    return resolve_source(config.teacher.model, trust_remote_code=config.teacher.trust_remote_code)


def student_source_config(config: Config) -> Any:
    """Return the transformers configuration that the student starts from (the teacher's, when cut out of it)."""
    student = config.student
    if student.from_teacher is not None:
        key, name, trusted = "teacher.model", config.teacher.model, config.teacher.trust_remote_code
    elif student.from_config:
        key, name, trusted = "student.from_config", student.from_config, student.trust_remote_code
    else:
        key, name, trusted = "student.model", student.model, student.trust_remote_code
    return load_config(resolve_source(name, trust_remote_code=trusted), key)


def load_config(source: ModelSource, key: str) -> Any:
    """Return the transformers configuration of a causal LM (its text part, for multimodal checkpoints).

    Args:
        source: where the model lies.
        key: the config key that named it, for messages.

    Raises:
        UserError: when there is no such model or its configuration cannot be read.
    """
    try:
        return AutoConfig.from_pretrained(source.name, **source.arguments())
    except ImportError as error:
        raise UserError(f"{key}: {source.name}: {_one_line(error)} (`pip install 'disaggkd[gguf]'` for GGUF)") from None
    except Exception as error:  # classes of configurations validate in their own ways, with errors of their own
        raise UserError(f"{key}: {_unreadable(source, error)}") from None


def without_weights(source: ModelSource, dtype: torch.dtype, key: str) -> nn.Module:
    """Return the causal LM on the meta device, in eval mode: its modules, names and shapes.

    Raises:
        UserError: when there is no such model, or its configuration cannot be read or makes no model.
    """
    config = load_config(source, key)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=source.trust_remote_code)
    except Exception as error:  # whatever a model's class says of a configuration that makes no model
        raise UserError(f"{key}: {_unreadable(source, error)}") from None
    return choose_kernels_by_device(model.eval())


def load_causal_lm(
    source: ModelSource,
    dtype: torch.dtype,
    key: str,
    *,
    model_class: Any = AutoModelForCausalLM,
    elsewhere: Collection[str] = (),
    **arguments: Any,
) -> nn.Module:
    """Return the causal LM in eval mode, with weights in `dtype`, on the CPU unless `arguments` say otherwise.

    Args:
        model_class: whose `from_pretrained` loads it. Tensors that it has no place for are not read.
        elsewhere: names of those that may lie in the files all the same, since others load them.
        arguments: more of `from_pretrained`'s, such as `distributed_config`.

    Raises:
        UserError: when the model cannot be found or read, or when its files do not hold the tensors that its
            configuration describes (see `verify_tensors`).
    """
    load_config(source, key)
    entries = _entries(source, key) if source.directory and not source.gguf_file else {}
    previous = _quiet_transformers()
    try:
        model, info = model_class.from_pretrained(
            source.name,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            **source.arguments(),
            **arguments,
        )
    except ImportError as error:
        raise UserError(f"{key}: {source.name}: {_one_line(error)} (`pip install 'disaggkd[gguf]'` for GGUF)") from None
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        if "above report" in str(error):  # which was logged, and names what cannot be put together by its results only
            odd = odd_tensors({name: entry.shape for name, entry in entries.items()})
            raise UserError(
                f"{key}: {source.name}: its tensors cannot be put together to those of the model"
                f"{f': {odd}' if odd else ''}; copy or download its files again"
            ) from None
        raise UserError(f"{key}: {_unreadable(source, error)}") from None
    except Exception as error:  # safetensors raises its own class, which derives from Exception directly
        raise UserError(
            f"{key}: the files in {source.name} are damaged or incomplete ({type(error).__name__}: {_one_line(error)});"
            " copy or download them again"
        ) from None
    finally:
        logging.getLogger("transformers").setLevel(previous)
    shapes = {name: entry.shape for name, entry in entries.items()}
    info["unexpected_keys"] = set(info["unexpected_keys"]) - set(elsewhere)
    verify_tensors(model, info, f"{key}: {source.name}", shapes)
    return choose_kernels_by_device(prepare_gguf(model).eval())


def prepare_gguf(model: nn.Module) -> nn.Module:
    """Drop what transformers leaves on a model read from GGUF, so that it can be saved like any other."""
    if getattr(model, "hf_quantizer", None) is not None:
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
    return model


def load_head(source: ModelSource, dtype: torch.dtype, key: str) -> Head:
    """Return the frozen LM head of a model, reading only its own tensors where the files allow it.

    Weight [V, H] and bias [V] come in `dtype` on the CPU. Files other than safetensors are loaded whole and verified.

    Raises:
        UserError: when the model cannot be read, or has no head that can be read.
    """
    return load_head_shard(source, dtype, key, lambda vocabulary: (0, vocabulary))[0]


def load_head_shard(
    source: ModelSource, dtype: torch.dtype, key: str, ids: Callable[[int], tuple[int, int]]
) -> tuple[Head, int]:
    """Return the head of some ids, as `load_head` would, and the size of the whole vocabulary.

    Args:
        ids: from the size of the vocabulary to `(start, stop)`. Only these rows are read from safetensors files.
    """
    config = load_config(source, key)
    source = _in_the_cache(source)
    entries = _head_tensors(source, dtype, key) if source.directory and not source.gguf_file else None
    if not entries:
        model = load_causal_lm(source, dtype, key)
        head = head_of(model)
        verify_split(model, head, f"{key} {source.name}")
        vocabulary = len(head.weight)
        part = head.detached().rows(*ids(vocabulary))
        weight, bias = part.weight.clone(), None if part.bias is None else part.bias.clone()
        return Head(weight, bias, head.scale, head.softcap), vocabulary
    tensors, vocabulary = _read_rows(entries, ids)
    # Copies: a tensor read by safetensors keeps its whole file mapped for as long as it lives.
    copies = {kind: tensor.to(dtype, copy=True) for kind, tensor in tensors.items()}
    weight = copies["weight"]
    verify_head_values(weight, f"{key}: {source.name}: {entries['weight'][0]}", whole=len(weight) == vocabulary)
    return Head(weight, copies.get("bias"), *head_semantics(config)), vocabulary


def _in_the_cache(source: ModelSource) -> ModelSource:
    """Return a hub name's model as the directory of the cache that holds the files `from_pretrained` would read.

    Those that are not there are downloaded. Without safetensors files, or with code of its own, it stays a name.
    """
    if source.directory is not None or source.trust_remote_code:
        return source
    found = None
    with contextlib.suppress(OSError, ValueError):  # whoever loads the model says what is wrong
        found = cached_file(source.name, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
        if found is None:
            found = cached_file(source.name, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
            if found is not None:
                get_checkpoint_shard_files(source.name, found)
    return source if found is None else replace(source, name=str(Path(found).parent))


def _entries(source: ModelSource, key: str) -> dict[str, TensorEntry]:
    try:
        return tensor_entries(source.directory)
    except UserError as error:
        raise UserError(f"{key}: {error}") from None


def _head_tensors(source: ModelSource, dtype: torch.dtype, key: str) -> dict[str, tuple[str, TensorEntry]] | None:
    """Return where the head's weight and bias lie, by kind, or None where the files do not tell.

    Raises:
        UserError: one has another shape than the configuration says.
    """
    model = without_weights(source, dtype, key)
    output = model.get_output_embeddings()
    if output is None:
        return None
    present = _entries(source, key)
    found = {}
    for kind in ("weight", "bias"):
        parameter = getattr(output, kind, None)
        if parameter is None:
            continue
        names = [name for name, other in model.named_parameters(remove_duplicate=False) if other is parameter]
        name = next((name for name in names if name in present), None)
        if name is None:
            return None
        if present[name].shape != tuple(parameter.shape):
            raise UserError(
                f"{key}: {source.name}: {name} is {present[name].shape} in the files and {tuple(parameter.shape)} by "
                "config.json; take the config.json that belongs to these weights"
            )
        found[kind] = (name, present[name])
    return found


def _read_rows(
    entries: dict[str, tuple[str, TensorEntry]], ids: Callable[[int], tuple[int, int]]
) -> tuple[dict[str, Tensor], int]:
    """Return the rows of the tensors, by kind, and how many rows there are in all."""
    from safetensors import safe_open

    tensors, vocabulary = {}, 0
    for kind, (name, entry) in entries.items():
        vocabulary = entry.shape[0]
        start, stop = ids(vocabulary)
        with safe_open(entry.file, "pt") as file:
            tensors[kind] = file.get_slice(name)[start:stop]
    return tensors, vocabulary


def _unreadable(source: ModelSource, error: Exception) -> str:
    if source.directory is None and not Path(source.name).exists():
        return (
            f"{source.name} is no local directory, and it could not be had from the hub: {_one_line(error)} "
            "(check the name, the network, and HF_TOKEN for gated models)"
        )
    if not (Path(source.name) / "config.json").is_file() and not source.gguf_file:
        return f"{source.name} holds no config.json, so it is no model directory"
    return f"{source.name} cannot be loaded: {type(error).__name__}: {_one_line(error)}"


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."


def _quiet_transformers() -> int:
    logger = logging.getLogger("transformers")
    previous = logger.level
    logger.setLevel(logging.ERROR)
    return previous
