"""Files that are there whole or not at all: written beside their place, then moved into it in one step."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Give a name beside `path` to write a file or a directory to, which takes path's place when the block ends.

    When the block raises, what it wrote is removed and `path` stays as it was.

    Args:
        path: a file or a directory, which may exist.
        durable: outlast a power cut too: the file is forced to the disk before it is moved, its directory after. Files
            inside of a directory are its writer's to force.

    Raises:
        OSError: as writing and moving do.
    """
    aside = aside_of(path, os.getpid())
    _remove_leftovers(path)
    try:
        yield aside
        if durable:
            sync(aside)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)  # a directory cannot be moved over one that holds files
        os.replace(aside, path)
    except BaseException:
        _remove(aside)
        raise
    if durable:
        sync(path.parent)


def aside_of(path: Path, process: int) -> Path:
    """Return the name that `replacing` gives in a process."""
    return path.with_name(f".{path.name}.{process}.writing")


def write_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Write `text` in UTF-8 as the whole of `path`, in one step (see `replacing`)."""
    with replacing(path, durable=durable) as aside:
        aside.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Force a file or a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_leftovers(path: Path) -> None:
    """Remove what processes of this machine that have ended left half-written, and what this one did."""
    for aside in path.parent.glob(f".{glob.escape(path.name)}.*.writing"):
        number = aside.name.split(".")[-2]
        if number.isdigit() and (int(number) == os.getpid() or not _alive(int(number))):
            _remove(aside)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def _remove(path: Path) -> None:
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError:  # a full or vanished disk: what made us remove it is the error to tell
        pass
