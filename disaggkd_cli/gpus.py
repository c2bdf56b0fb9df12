"""The GPUs of this machine, without torch: which there are, and which a job holds while it runs."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from disaggkd_cli.errors import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"
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
    wanted = [name.strip() for name in visible.split(",")]
    return [known.get(name, name) for name in wanted]


def _identifiers() -> dict[str, str]:
    """Return index -> UUID of all GPUs, or nothing where nvidia-smi does not tell."""
    try:
        told = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    pairs = [line.split(",") for line in told.splitlines() if line.count(",") == 1]
    return {index.strip(): identifier.strip() for index, identifier in pairs}


class HeldGpus:
    """GPUs that this process holds against other jobs until it closes them or ends, however it ends.

    A lock of the operating system on a file per GPU in the directory for temporary files; the kernel lets go of it with
    the process. Processes that this one starts do not inherit it.
    """

    def __init__(self, names: Sequence[str], job: str, directory: str | None = None) -> None:
        """Take all of `names`, or none.

        Args:
            names: of `gpus_here`.
            job: what the refusal of another job shall say of this one.

        Raises:
            UserError: another job holds one of them and says which it is.
        """
        self._files: list[int] = []
        try:
            for name in dict.fromkeys(names):
                self._take(name, job, Path(directory or tempfile.gettempdir()))
        except BaseException:
            self.close()
            raise

    def _take(self, name: str, job: str, directory: Path) -> None:
        path = directory / f"disaggkd-gpu-{re.sub(r'[^A-Za-z0-9-]', '_', name)}.lock"
        file = _opened(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(file, 500).decode(errors="replace").strip() or "another job"
            os.close(file)
            raise UserError(
                f"{VISIBLE}: GPU {name} of this machine is taken by {holder}; give each job GPUs of its own, such as "
                f"{VISIBLE}=0,1 for one and {VISIBLE}=2,3 for the other, or wait until that one has ended"
            ) from None
        self._files.append(file)
        try:
            os.ftruncate(file, 0)
            os.write(file, f"{job} (process {os.getpid()})\n".encode())
        except OSError:
            pass  # another user's file, or a full disk: the lock holds, its holder goes unnamed

    def close(self) -> None:
        """Let go of all of them."""
        while self._files:
            os.close(self._files.pop())


def _opened(path: Path) -> int:
    """Open a lock's file, made for all users; one that is there is opened without O_CREAT, which systems may refuse
    for another user's file in a directory for temporary ones."""
    try:
        for flags in (os.O_RDWR, os.O_RDWR | os.O_CREAT | os.O_EXCL, os.O_RDWR):
            try:
                file = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            except (FileNotFoundError, FileExistsError):
                continue
            if flags & os.O_CREAT:
                os.fchmod(file, 0o666)
            return file
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(
            f"{path}: the lock of a GPU cannot be opened ({error.strerror}); set TMPDIR to a directory that jobs of "
            "this machine share and may write to"
        ) from None
