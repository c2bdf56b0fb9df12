"""Checkpoints that can be trusted: safetensors only, written aside, hashed, made durable, and renamed last.

`checkpoints/step_00000100/` holds one safetensors file a rank (torch.distributed.checkpoint writes and reshards them)
and `manifest.json` with the step, what the run was made of, and the size and sha256 of every file. A directory without
a manifest that matches its files is no checkpoint. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_state_dict

from disaggkd_cli import files
from disaggkd_cli.errors import RunError, UserError
from disaggkd_cli.faults import fault_point
from disaggkd_cli.training.save_watch import SaveWatch

MANIFEST = "manifest.json"
FORMAT = 1
PROJECTION = "student.projection"
_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Checkpoint:
    """A valid checkpoint on disk.

    Attributes:
        directory: where it lies.
        step: optimizer steps done.
        identity: what the run was made of (data, tokenizer, teacher, …), as given to `Checkpointer.save`.
        files: names of those that belong to it; whatever else lies in the directory is not read.
    """

    directory: Path
    step: int
    identity: dict[str, Any]
    files: tuple[str, ...]


def step_directory(root: Path, step: int) -> Path:
    """Return the directory of the checkpoint after `step` steps."""
    return root / f"step_{step:08d}"


def read_checkpoint(directory: Path) -> Checkpoint:
    """Return the checkpoint in `directory` after comparing every file with the manifest.

    Raises:
        UserError: naming the file that is missing, truncated or altered.
    """
    manifest = read_manifest(directory)
    for name, entry in manifest["files"].items():
        file = directory / name
        if not file.is_file():
            raise UserError(f"{file}: is missing")
        if file.stat().st_size != entry["bytes"]:
            raise UserError(f"{file}: has {file.stat().st_size} bytes, but the manifest says {entry['bytes']}")
        if _sha256(file) != entry["sha256"]:
            raise UserError(f"{file}: its contents differ from what was written (sha256)")
    return Checkpoint(directory, manifest["step"], manifest["identity"], tuple(manifest["files"]))


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint, its shape checked and its files not.

    Raises:
        UserError: there is none, or it is damaged or of another format.
    """
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{directory}: has no {MANIFEST}, so it was never finished") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: is damaged ({type(error).__name__}: {error})") from None
    if isinstance(manifest, dict) and manifest.get("format", FORMAT) != FORMAT:
        raise UserError(f"{directory}: is of format {manifest['format']}, but this version reads {FORMAT}")
    if fault := _fault_of(manifest, directory):
        raise UserError(f"{path}: is damaged ({fault})")
    return manifest


def _fault_of(manifest: Any, directory: Path) -> str:
    """Return what is wrong with the shape of a manifest, or nothing."""
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        return "it is no manifest"
    step, entries = manifest.get("step"), manifest.get("files")
    if type(step) is not int or step < 0:
        return f"step is {step!r}, no number of steps"
    if re.fullmatch(r"step_\d+", directory.name) and directory.name != step_directory(directory.parent, step).name:
        return f"step is {step}, which does not belong in {directory.name}"
    if not isinstance(manifest.get("identity"), dict):
        return "identity is no mapping"
    if not isinstance(entries, dict) or not entries:
        return "files is no mapping of files"
    for name, entry in entries.items():
        if name in ("", ".", "..", MANIFEST) or name != Path(name).name:
            return f"{name!r} is no file of this directory"
        if (
            not isinstance(entry, dict)
            or type(entry.get("bytes")) is not int
            or not isinstance(entry.get("sha256"), str)
        ):
            return f"the entry of {name} is no size and sha256"
    return ""


def newest_checkpoint(root: Path, log: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest valid checkpoint under `root`, logging which newer ones are refused and why."""
    for directory in sorted(root.glob("step_*"), reverse=True):
        try:
            return read_checkpoint(directory)
        except UserError as error:
            log(f"checkpoint refused: {error}")
    return None


class Checkpointer:
    """Writes checkpoints in the background, one at a time, and prunes old ones.

    Args:
        root: the directory of all checkpoints.
        keep: how many of the newest stay.
        group: a process group of the student ranks that nothing else uses.
        timeout: seconds without progress after which one counts as hung.
    """

    def __init__(self, root: Path, keep: int, group: dist.ProcessGroup, timeout: float = 1800.0) -> None:
        self.root = root
        self.timeout = timeout
        self.keep = keep
        self.group = group
        self._finisher: threading.Thread | None = None
        self._watch: SaveWatch | None = None
        self._error: BaseException | None = None
        self.started_step: int | None = None

    def save(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        step: int,
        identity: dict[str, Any],
        texts: dict[str, str] | None = None,
    ) -> None:
        """Start writing the checkpoint after `step`; waits for the previous one first.

        Args:
            texts: files beside the tensors, by name; rank 0 writes its own.

        Raises:
            RunError: when the previous one, or the start of this one, failed.
        """
        self.wait()
        self.started_step = None
        rank = dist.get_rank(self.group)
        aside = self.root / f".writing_step_{step:08d}"
        error: OSError | None = None
        try:
            if rank == 0:
                self.root.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir()
                for name, text in (texts or {}).items():
                    files.write_text(aside / name, text)
            fault_point("ckpt_open")
        except OSError as failure:
            error = failure
        if self._any_failed(error):
            raise self._failure(step, error)
        try:
            writer = HuggingFaceStorageWriter(str(aside), save_distributed=True)
            future = dcp.async_save(training_state(module, optimizer), storage_writer=writer, process_group=self.group)
        except (Exception, CheckpointException) as failure:  # the latter is no Exception
            raise self._failure(step, failure) from failure

        def finish() -> None:
            error: BaseException | None = None
            try:
                try:
                    future.result()
                    _describe_own(aside, rank)
                except BaseException as failure:
                    error = failure
                if self._any_failed(error):  # every rank asks, so that none waits for one that failed
                    raise error or RunError("another student rank could not write its share; see its log")
                if rank == 0:
                    _finish(aside, step_directory(self.root, step), step, identity)
                    _prune(self.root, self.keep)
            except BaseException as failure:  # handed to the training thread by wait()
                self._error = self._failure(step, failure)
                shutil.rmtree(aside, ignore_errors=True)  # on a full disk the logs and the status need the room

        self.started_step = step
        self._watch = SaveWatch(aside)
        self._finisher = threading.Thread(target=finish, name="checkpoint", daemon=True)
        self._finisher.start()

    def wait(self) -> None:
        """Wait until the checkpoint in progress, if any, is safely on disk everywhere.

        Raises:
            RunError: when it could not be written, on every rank, or nothing is heard of it for `timeout` seconds.
        """
        if self._finisher is None:
            return
        while self._finisher.is_alive():
            self._finisher.join(_LOOK_SECONDS)
            if self._finisher.is_alive() and self._watch.silent_seconds() > self.timeout:
                raise RunError(
                    f"the checkpoint that is written to {self.root} has made no progress for {self.timeout:g} s "
                    "(train.save_timeout): the disk hangs, or another student rank does; mend it, then go on with "
                    "--resume auto"
                )
        self._watch.close()
        self._finisher = None
        error, self._error = self._error, None
        if self._any_failed(error):
            self.started_step = None
            raise error or RunError("the checkpoint could not be written on another student rank; see its log")

    def _any_failed(self, error: BaseException | None) -> bool:
        failed = torch.tensor([int(error is not None)])
        dist.all_reduce(failed, group=self.group)
        return bool(failed.item())

    def _failure(self, step: int, cause: BaseException | None) -> RunError:
        reason = _cause(cause) if cause else "another student rank failed; see its log"
        return RunError(f"checkpoint of step {step} could not be written to {self.root}: {reason}")


def training_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return every tensor that training needs to go on, by name: sharded parameters and optimizer state.

    Parameters that appear twice (tied embeddings) are listed once. Hyperparameters are not part of it: they come from
    the config.
    """
    parameters, optimizer_state = get_state_dict(module, optimizer)
    state = _listed_once(parameters)
    for name, entries in optimizer_state["state"].items():
        for key, tensor in entries.items():
            state[f"optimizer.{name}.{key}"] = tensor
    return state


def read_weights(checkpoint: Checkpoint, model: nn.Module, names: list[str]) -> dict[str, Tensor]:
    """Return some whole tensors of a student's checkpoint, on the CPU. Needs no process group.

    Args:
        model: the student, which may have no weights.
        names: of its state dict; several names of one tensor come as one tensor.

    Raises:
        UserError: when the checkpoint belongs to a student of other shapes.
    """
    own = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    for name, tensor in own.items():
        first.setdefault(id(tensor), name)
    empty = {first[id(own[name])]: torch.empty_like(own[name], device="cpu").detach() for name in names}
    reader = _reader(checkpoint)
    try:
        dcp.load(
            {f"student.model.{name}": tensor for name, tensor in empty.items()}, storage_reader=reader, no_dist=True
        )
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        raise UserError(f"{checkpoint.directory}: does not fit this student ({_cause(error)})") from error
    return {name: empty[first[id(own[name])]] for name in names}


def _listed_once(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in parameters.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            state[f"student.{name}"] = tensor
    return state


def load_training_state(
    checkpoint: Checkpoint, module: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup
) -> None:
    """Read a checkpoint into the module and the optimizer, in place, whatever number of ranks wrote it.

    Raises:
        UserError: when it belongs to a student of other shapes.
    """
    _fill_optimizer_state(optimizer)
    try:
        state, reader = training_state(module, optimizer), _reader(checkpoint)
        if anew := _projection_anew(state, reader):
            state = {name: tensor for name, tensor in state.items() if name not in anew}
        dcp.load(
            state,
            storage_reader=reader,
            process_group=group,
        )
        if anew:
            optimizer.state.pop(module.projection)  # it begins at its first step, as its weights do
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        raise UserError(
            f"{checkpoint.directory}: does not fit this student ({_cause(error)}); "
            "resume with the config that wrote it, or start in another run_dir"
        ) from error


def _projection_anew(state: dict[str, Tensor], reader: HuggingFaceStorageReader) -> set[str]:
    """Return the names of a projection of hidden states that a checkpoint lacks, since the run began without one."""
    own = {name for name in state if name == PROJECTION or name.startswith("optimizer.projection.")}
    return own if own and PROJECTION not in reader.read_metadata().state_dict_metadata else set()


def _reader(checkpoint: Checkpoint) -> HuggingFaceStorageReader:
    """Return a reader of the files that the manifest names: torch's own reads every safetensors file beside them."""
    reader = HuggingFaceStorageReader(str(checkpoint.directory))
    reader.fs = _ListedFiles(reader.fs, checkpoint.files)
    return reader


class _ListedFiles:
    """A file system whose directories hold certain names only."""

    def __init__(self, whole: Any, names: Sequence[str]) -> None:
        self._whole, self._names = whole, frozenset(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def ls(self, path: str) -> list[str]:
        return [file for file in self._whole.ls(path) if Path(file).name in self._names]


def _fill_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make AdamW allocate its state without changing a weight, so that there is something to load into."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _describe_own(aside: Path, rank: int) -> None:
    """Force what this rank wrote to the disk, and leave its sizes and hashes for rank 0: each rank reads its own."""
    own = aside.glob(f"shard-{rank + 1:05d}-*.safetensors")  # as torch.distributed.checkpoint names them
    files.write_text(aside / _digests_of(rank), json.dumps({path.name: _described(path) for path in sorted(own)}))


def _digests_of(rank: int | str) -> str:
    return f".digests_{rank}.json"


def _described(path: Path) -> dict[str, Any]:
    files.sync(path)
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _finish(aside: Path, final: Path, step: int, identity: dict[str, Any]) -> None:
    described: dict[str, Any] = {}
    for path in sorted(aside.glob(_digests_of("*"))):
        described |= json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
    entries = {path.name: described.get(path.name) or _described(path) for path in sorted(aside.iterdir())}
    fault_point("ckpt_fsync")
    manifest = {"format": FORMAT, "step": step, "identity": identity, "files": entries}
    files.write_text(aside / MANIFEST, json.dumps(manifest, indent=1), durable=True)
    fault_point("ckpt_rename")
    if final.exists():
        shutil.rmtree(final)
    os.replace(aside, final)
    files.sync(final.parent)


def _prune(root: Path, keep: int) -> None:
    for directory in sorted(root.glob("step_*"))[:-keep]:
        shutil.rmtree(directory, ignore_errors=True)
    for aside in root.glob(".writing_step_*"):
        shutil.rmtree(aside, ignore_errors=True)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _cause(error: BaseException) -> str:
    """Return the innermost message: torch.distributed.checkpoint hides the cause in a table of ranks."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
