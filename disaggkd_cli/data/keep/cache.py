"""The directory that keeps tokens between runs, and who may write in it when.

An entry's name is a hash of all that decides what it holds, so entries never change: they are there or not. Whoever
builds one holds its file lock, which the kernel takes back when the process ends, however it ends; the others (ranks of
this run, other runs) wait and then read. While it works the builder says in the lock file how far it is.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from disaggkd_cli.data.tokenise.token_batches import Progress
from disaggkd_cli.errors import RunError, UserError
from disaggkd_cli.units import format_bytes

WORTH_CACHING = 8 << 20
"""Bytes of texts below which `data.cache: auto` keeps nothing: to tokenise them again takes a few seconds."""
SILENCE = 900.0
"""Seconds without a sign of life of whoever builds an entry, after which waiting for it ends."""
_POLL = 0.2


class Cache:
    """One cache directory."""

    def __init__(self, directory: Path, progress: Progress | None = None, silence: float = SILENCE) -> None:
        """
        Raises:
            UserError: the directory can't be made or written to.
        """
        self.directory = directory
        self._progress = progress
        self._silence = silence
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            raise UserError(
                f"data.cache: {directory} can't be written to ({error.strerror}); name another directory, or null"
            ) from error

    def entry(self, kind: str, facts: Any) -> Path:
        """The directory of the entry that `facts` (plain data) decide."""
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True, ensure_ascii=True).encode()).hexdigest()
        return self.directory / f"{kind}-{digest[:32]}"

    @contextmanager
    def locked(
        self, entry: Path, what: str, ready: Callable[[], bool], outer: Lock | None = None
    ) -> Iterator[Lock | None]:
        """Hold the entry's lock, unless it gets ready while somebody else holds it (then: None).

        Whoever waits for `outer`, which this process holds, is given signs of life while it waits in its turn.

        Raises:
            RunError: whoever holds it has given no sign of life for SILENCE seconds.
        """
        path = entry.with_name(entry.name + ".lock")
        silence = _Silence(path)
        with path.open("a+") as file:
            while not _try_lock(file):
                if ready():
                    yield None
                    return
                self._wait(path, what, silence, outer)
            try:
                lock = Lock(path, self._progress)
                lock.sign("", 0, None)
                yield lock
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)

    def _wait(self, path: Path, what: str, silence: _Silence, outer: Lock | None) -> None:
        silent = silence.seconds()
        try:
            sign = json.loads(path.read_text())
            who, task = f"process {sign['process']} on {sign['host']}", sign["what"] or what
            documents, share = int(sign["documents"]), sign["share"]
        except (OSError, ValueError, KeyError, TypeError):
            who, task, documents, share = "another process", what, 0, None
        if silent > self._silence:
            raise RunError(
                f"data.cache: waited for {who}, which holds {path} ({task}), but it has given no sign of life for "
                f"{silent:.0f} s; end it, or set data.cache to another directory"
            )
        if outer is not None:
            outer.sign("", documents, share)
        if self._progress:
            self._progress(f"{task} (by {who}; waiting for it)", documents, share)
        time.sleep(_POLL)

    @contextmanager
    def told_when_full(self) -> Iterator[None]:
        """Turn a full disk into a message.

        Raises:
            UserError: the disk, or the user's share of it, is full.
        """
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            free = format_bytes(shutil.disk_usage(self.directory).free)
            raise UserError(
                f"data.cache: no room left in {self.directory} ({free} free; a token takes 16 bytes there). Free some "
                "(finished shards are kept, and the next start goes on from them), name a directory on another disk "
                "with data.cache, or set data.cache=null to hold the tokens in memory"
            ) from error


class Lock:
    """Held while an entry is built."""

    def __init__(self, path: Path, progress: Progress | None) -> None:
        self._path = path
        self._progress = progress

    def sign(self, what: str, documents: int, share: float | None) -> None:
        """Say how far the work is, here and to those who wait."""
        sign = {
            "process": os.getpid(),
            "host": socket.gethostname(),
            "what": what,
            "documents": documents,
            "share": share,
        }
        try:
            self._path.write_text(json.dumps(sign))
        except OSError:
            os.utime(self._path)  # a full disk is told by whoever writes what matters
        if what and self._progress:
            self._progress(what, documents, share)


class _Silence:
    """How long a file has not been written to, as far as this process has seen; the clock may be set meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: int | None = None
        self._since = time.monotonic()

    def seconds(self) -> float:
        written = self._path.stat().st_mtime_ns
        if written != self._written:
            self._written, self._since = written, time.monotonic()
        return time.monotonic() - self._since


def _try_lock(file: Any) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def default_directory() -> Path:
    """Where `data.cache: auto` keeps tokens."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "disaggkd"


def replace_directory(built: Path, entry: Path) -> None:
    """Put a finished directory in an entry's place."""
    if entry.exists():
        shutil.rmtree(entry)
    os.rename(built, entry)
