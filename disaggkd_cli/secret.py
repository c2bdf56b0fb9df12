"""The secret of a run: a file that its user alone may read, by which its student and its teachers know each other.

The student makes it in its run directory and says at the rendezvous where that is. Whoever cannot see that directory
needs a copy of the file (`launch.secret_file`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import time
from collections.abc import Callable
from pathlib import Path

from disaggkd_cli.errors import UserError

FEWEST_CHARACTERS = 32
_MOST_BYTES = 4096
_POLL_SECONDS = 0.1


def make_secret(path: Path) -> None:
    """Make a secret at `path` (mode 0600), unless there is one: a teacher that outlived the last start still holds it.

    Raises:
        UserError: the file cannot be written.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            return
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32) + "\n")
        try:
            os.link(aside, path)  # unlike a rename, leaves one that another process has just made
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            os.replace(aside, path)
    except OSError as error:
        problem = f"cannot write the secret of the run to {path}: {error.strerror}; set launch.secret_file"
        raise UserError(problem) from None
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()


def read_secret(path: Path, key: str = "launch.secret_file") -> bytes:
    """Return the secret at `path`, without white space around it.

    Raises:
        UserError: there is none, others may read it, or it is too short; names `key`.
    """
    try:
        with path.open("rb") as file:
            facts = os.fstat(file.fileno())
            text = file.read(_MOST_BYTES + 1).strip()
    except OSError as error:
        raise UserError(
            f"{key}: cannot read the secret of the run at {path}: {error.strerror}; the student's is "
            "run_dir/secret: copy that (mode 0600)"
        ) from None
    if not stat.S_ISREG(facts.st_mode) or stat.S_IMODE(facts.st_mode) & 0o077:
        mode = f"{stat.S_IMODE(facts.st_mode):04o}"
        raise UserError(f"{key}: {path} may be read by others (mode {mode}), so it is no secret; chmod 600 {path}")
    if facts.st_uid not in (0, os.geteuid()):
        raise UserError(f"{key}: {path} belongs to user {facts.st_uid}, not to you; make a copy of it")
    if not FEWEST_CHARACTERS <= len(text) <= _MOST_BYTES:
        raise UserError(
            f"{key}: {path} holds {len(text)} bytes, where a secret has {FEWEST_CHARACTERS} to {_MOST_BYTES}; make one "
            f"with `(umask 077; openssl rand -hex 32 > {path})`"
        )
    return text


def await_secret(find: Callable[[], Path | None], expected: Path, seconds: float, log: Callable[[str], None]) -> bytes:
    """Return the secret that `find` comes upon, asking it again and again for at most `seconds`.

    Args:
        expected: where the student is expected to make it, for messages.

    Raises:
        UserError: none came, or see `read_secret`.
    """
    deadline = time.monotonic() + seconds
    told = False
    while (path := find()) is None:
        if time.monotonic() >= deadline:
            raise UserError(
                f"no secret of the run came to {expected} within {seconds:g} s; the student makes it in its run_dir: "
                "copy it here (mode 0600) and set launch.secret_file to it, or set launch.secret=none on both sides "
                "where everybody who reaches the rendezvous is trusted"
            )
        if not told:
            log(f"waiting at most {seconds:g} s for the student to make {expected}")
            told = True
        time.sleep(_POLL_SECONDS)
    return read_secret(path, "run_dir" if path == expected else "launch.secret_file")
