"""Write the student as a Hugging Face model directory that `from_pretrained` loads, checked by loading it again.

Files of at most 4 GiB are written rank by rank: each is gathered, tensor by tensor and in the dtype to write, on the
rank whose turn it is, and let go of once it lies on the disk. So no process ever holds the whole model, and none waits
for another longer than a file takes.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from disaggkd_cli import files
from disaggkd_cli.errors import DisaggkdError, RunError
from disaggkd_cli.models import resolve_source
from disaggkd_cli.models.lora import has_adapters, is_adapter, merged_state, plain_name, save_adapters
from disaggkd_cli.models.parts import grouped, read_parts
from disaggkd_cli.training.layout import waiting_for

FILE_BYTES = 4 * 2**30
_MASTER_BYTES = 4
_WEIGHTS = "model.safetensors"

Fetch = Callable[[list[str], int], dict[str, Tensor]]
"""From names of the student's tensors and a rank to the whole tensors, on that rank's CPU; nothing on the others."""


@dataclass(frozen=True)
class _Ranks:
    rank: int = 0
    count: int = 1


def export_student(
    model: nn.Module, tokenizer: Any, directory: Path, dtype: torch.dtype, card: str = "", file_bytes: int = FILE_BYTES
) -> None:
    """Write the student, which may be sharded (see `write_student`). Collective over all student ranks."""
    rank, state = dist.get_rank(), model.state_dict()

    @torch.no_grad()
    def fetch(names: list[str], owner: int) -> dict[str, Tensor]:
        found = {}
        for name in names:
            tensor = state[name]
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if rank == owner:
                found[name] = _as_written(whole, name, dtype).cpu()
            del whole
        return found

    write_student(model, fetch, tokenizer, directory, dtype, card, file_bytes, _Ranks(rank, dist.get_world_size()))


def write_student(
    model: nn.Module,
    fetch: Fetch,
    tokenizer: Any,
    directory: Path,
    dtype: torch.dtype,
    card: str = "",
    file_bytes: int = FILE_BYTES,
    ranks: _Ranks = _Ranks(),
) -> None:
    """Write the student as a model directory, aside and then renamed, after loading it back from there.

    Args:
        model: the causal LM; only its names, shapes and configuration are read.
        fetch: gives its tensors. Collective over the ranks.
        tokenizer: saved beside it.
        directory: where to; replaced when it exists.
        dtype: of the weights on disk.
        card: what becomes `README.md`; empty writes none.
        file_bytes: of one file of weights, unless a single layer is larger.
        ranks: how many write, and which of them this is.

    Raises:
        RunError: when it cannot be written, or does not load back to the same weights; on every rank.
    """
    whole = _without_weights(model, dtype)
    groups = [
        [name for name in names if whole.all_tied_weights_keys.get(name) not in names]
        for names in grouped(model, lambda name: True, file_bytes * _MASTER_BYTES // dtype.itemsize)
    ]
    with _aside(directory, ranks) as aside:
        if ranks.rank == 0:
            with _told(directory):
                whole.save_pretrained(aside, state_dict={})  # what lies beside the weights
                (aside / _WEIGHTS).unlink(missing_ok=True)
                tokenizer.save_pretrained(aside)
        digests: dict[int, dict[str, str]] = {}
        for number, names in enumerate(groups):
            owner = number % ranks.count
            with _together(ranks), _told(directory):
                tensors = fetch(names, owner)
                if ranks.rank == owner:
                    digests[number] = _write_file(model, whole, tensors, aside / _name_of(number, len(groups)), dtype)
                del tensors
        adapters = fetch([name for name in model.state_dict() if is_adapter(name)], 0) if has_adapters(model) else {}
        with _together(ranks), _told(directory):
            if ranks.rank == 0:
                _finish(model, aside, adapters, card, len(groups))
        with _together(ranks), _told(directory):
            for number, expected in digests.items():
                _compare(whole, aside, directory, expected, groups[number])


def _write_file(
    model: nn.Module, whole: nn.Module, tensors: dict[str, Tensor], path: Path, dtype: torch.dtype
) -> dict[str, str]:
    """Write one file, and return a digest of each tensor by the name that the loaded model has for it."""
    plain = merged_state(model, tensors) if has_adapters(model) else tensors
    plain = {name: _as_written(tensor, name, dtype) for name, tensor in plain.items()}
    digests = {name: _digest(tensor) for name, tensor in plain.items()}
    written = {name: tensor.contiguous() for name, tensor in revert_weight_conversion(whole, plain).items()}
    save_file(written, path, metadata={"format": "pt"})
    return digests


def _finish(model: nn.Module, aside: Path, adapters: dict[str, Tensor], card: str, count: int) -> None:
    if count > 1:
        index: dict[str, str] = {}
        size = 0
        for number in range(count):
            with safe_open(aside / _name_of(number, count), "pt") as file:
                index |= dict.fromkeys(file.keys(), _name_of(number, count))
            size += (aside / _name_of(number, count)).stat().st_size
        record = {"metadata": {"total_size": size}, "weight_map": dict(sorted(index.items()))}
        files.write_text(aside / f"{_WEIGHTS}.index.json", json.dumps(record, indent=2) + "\n")
    if adapters:
        save_adapters(model, adapters, aside / "adapters")
    if card:
        (aside / "README.md").write_text(card, encoding="utf-8")
    _modes_by_umask(aside)


def _name_of(number: int, count: int) -> str:
    return _WEIGHTS if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _as_written(tensor: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """Adapters stay as they are until they are merged into their matrix; base matrices of theirs too."""
    if not tensor.is_floating_point() or is_adapter(name) or plain_name(name) != name:
        return tensor
    return tensor.to(dtype)


def _digest(tensor: Tensor) -> str:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(memoryview(data)).hexdigest()


def _compare(whole: nn.Module, aside: Path, directory: Path, expected: dict[str, str], names: list[str]) -> None:
    """Load the tensors of one file back through transformers' loader, and compare them with what was written."""
    plain = {plain_name(name) for name in names if not is_adapter(name)}
    limit = sum(tensor.nbytes for tensor in whole.state_dict().values()) + 1
    found: dict[str, str] = {}
    try:
        for part in read_parts(resolve_source(str(aside)), whole, "export", plain.__contains__, limit):
            found |= {name: _digest(tensor) for name, tensor in part.items() if name in expected}
    except DisaggkdError as error:
        raise RunError(f"the student written to {directory} does not load back: {error}") from None
    if differing := [name for name, digest in expected.items() if found.get(name) != digest]:
        names_told = ", ".join(differing[:3])
        raise RunError(f"the student written to {directory} does not load back to the same weights: {names_told}")


def _without_weights(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    config = copy.deepcopy(model.config)
    config.name_or_path = ""  # it is no copy of what it began as, and a path of this machine is nobody's business
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config, dtype=dtype)
    whole.generation_config = copy.deepcopy(model.generation_config)
    return whole.eval()


def _modes_by_umask(directory: Path) -> None:
    """Give each file the mode that any new file here gets; safetensors makes files that only their owner reads."""
    umask = os.umask(0)
    os.umask(umask)
    for path in directory.rglob("*"):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)


@contextmanager
def _told(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(f"the student could not be written to {directory}: {error}") from error


@contextmanager
def _aside(directory: Path, ranks: _Ranks) -> Iterator[Path]:
    """Give all ranks the directory that rank 0 makes beside `directory`, and moves there when all is well."""
    if ranks.rank == 0:
        with _told(directory), files.replacing(directory) as aside:
            with _together(ranks):
                aside.mkdir(parents=True)
            _told_number(int(aside.name.split(".")[-2]), ranks)
            yield aside
    else:
        with _together(ranks):
            pass
        yield files.aside_of(directory, _told_number(0, ranks))


def _told_number(number: int, ranks: _Ranks) -> int:
    """Return rank 0's number on every rank."""
    told = torch.tensor([number])
    if ranks.count > 1:
        dist.broadcast(told, src=0)
    return int(told)


@contextmanager
def _together(ranks: _Ranks) -> Iterator[None]:
    """Wait for the others after the block; where one failed, all raise RunError."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    if ranks.count > 1:
        failed = torch.tensor([int(failure is not None)])
        with waiting_for("the others' part of the export"):
            dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        if failure is None and failed.item():
            failure = RunError("the student could not be written on another student rank; see its log")
    if failure is not None:
        raise failure
