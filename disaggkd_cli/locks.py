"""Locks that a process holds against others, each a lock of the operating system on a file.

The kernel lets go of one with the process that holds it, however that ends; processes that it starts do not inherit it.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class Taken(Exception):
    """Somebody else holds the lock; the message is what he wrote about himself, or empty."""


class Lock:
    """A lock that is held from here on until it is closed.

    Args:
        path: the lock's file; it stays when the lock goes, since another process may wait with it in hand.
        holder: what others read who find it taken.

    Raises:
        Taken: another process holds it, or this one does already.
        OSError: the file cannot be opened; or (ENOLCK, ENOSYS, EOPNOTSUPP) its file system has no locks.
    """

    def __init__(self, path: Path, holder: str) -> None:
        self._file: int | None = _opened(path)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            told = os.read(self._file, 500).decode(errors="replace").strip()
            self.close()
            raise Taken(told) from None
        except OSError:
            self.close()
            raise
        try:
            os.ftruncate(self._file, 0)
            os.write(self._file, f"{holder} (process {os.getpid()})\n".encode())
        except OSError:
            pass  # another user's file, or a full disk: the lock holds, its holder goes unnamed

    def close(self) -> None:
        """Let go of it; twice does nothing."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _opened(path: Path) -> int:
    """Open a lock's file, made for all users; one that is there is opened without O_CREAT, which systems may refuse
    for another user's file in a directory for temporary ones."""
    for flags in (os.O_RDWR, os.O_RDWR | os.O_CREAT | os.O_EXCL, os.O_RDWR):
        try:
            file = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except (FileNotFoundError, FileExistsError):
            continue
        if flags & os.O_CREAT:
            os.fchmod(file, 0o666)
        return file
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
