"""The GPUs of this machine, without torch: which there are, and which a job holds while it runs."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from disaggkd_cli.errors import UserError
from disaggkd_cli.locks import Lock, Taken

VISIBLE = "CUDA_VISIBLE_DEVICES"
SHARE = "DISAGGKD_SHARE_GPUS"
"""Variable of the environment: with 1, jobs of this machine may take the same GPU."""
_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
_QUERY = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
_QUERY_SECONDS = 20.0


def gpus_here(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> list[str]:
    """Return what names the GPUs that a job started here would see, in CUDA's order: a UUID where it is known, else
    a number of `nvidia-smi`."""
    count = sum(1 for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    visible = environment.get(VISIBLE)
    if not count or visible is not None and visible.strip() in ("", "-1"):
        return []
    known = _identifiers() or {str(number): str(number) for number in range(count)}
    if visible is None:
        return list(known.values())
    return [_known_as(name.strip(), known) for name in visible.split(",")]


def _known_as(name: str, known: Mapping[str, str]) -> str:
    """Return the UUID that a number, or the beginning of a UUID, stands for; a name that is not known as it is."""
    if name in known:
        return known[name]
    return next((one for one in known.values() if name.startswith("GPU-") and one.startswith(name)), name)


def _identifiers() -> dict[str, str]:
    """Return index -> UUID of all GPUs, or nothing where nvidia-smi does not tell."""
    try:
        told = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    pairs = [line.split(",") for line in told.splitlines() if line.count(",") == 1]
    return {index.strip(): identifier.strip() for index, identifier in pairs}


def prepare_allocator(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have torch's allocator grow its segments, as `plan` reckons, unless the user configured it; before torch starts.

    Without it a GPU loses up to half of its memory to gaps between blocks of changing sizes.
    """
    if _ALLOCATOR not in environment and "PYTORCH_ALLOC_CONF" not in environment:
        environment[_ALLOCATOR] = "expandable_segments:True"


def hold_gpus(count: int, job: str, environment: Mapping[str, str] = os.environ) -> HeldGpus:
    """Hold the first `count` GPUs that are visible here, which `count` ranks started here would take.

    GPUs that nvidia-smi does not identify are not held: in containers and under SLURM a number means another GPU to
    each job. Nor are any with `DISAGGKD_SHARE_GPUS=1`.

    Raises:
        UserError: another job holds one of them.
    """
    if not count or environment.get(SHARE) == "1":
        return HeldGpus([], job)
    return HeldGpus([name for name in gpus_here(environment)[:count] if not name.isdigit()], job)


class HeldGpus:
    """GPUs that this process holds against other jobs until it closes them or ends, however it ends.

    A lock per GPU, on a file in the directory for temporary files.
    """

    def __init__(self, names: Sequence[str], job: str, directory: str | None = None) -> None:
        """Take all of `names`, or none.

        Args:
            names: of `gpus_here`.
            job: what the refusal of another job shall say of this one.

        Raises:
            UserError: another job holds one of them and says which it is.
        """
        self._locks: list[Lock] = []
        try:
            for name in dict.fromkeys(names):
                self._take(name, job, Path(directory or tempfile.gettempdir()))
        except BaseException:
            self.close()
            raise

    def _take(self, name: str, job: str, directory: Path) -> None:
        path = directory / f"disaggkd-gpu-{re.sub(r'[^A-Za-z0-9-]', '_', name)}.lock"
        try:
            self._locks.append(Lock(path, job))
        except Taken as taken:
            raise UserError(
                f"{VISIBLE}: GPU {name} of this machine is taken by {str(taken) or 'another job'}; give each job GPUs "
                f"of its own, such as {VISIBLE}=0,1 for one and {VISIBLE}=2,3 for the other, or wait until that one "
                f"has ended ({SHARE}=1 lets jobs share a GPU)"
            ) from None
        except OSError as error:
            raise UserError(
                f"{path}: the lock of a GPU cannot be taken ({error.strerror}); set TMPDIR to a directory that jobs of "
                "this machine share and may write to"
            ) from None

    def __enter__(self) -> HeldGpus:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all of them."""
        while self._locks:
            self._locks.pop().close()
