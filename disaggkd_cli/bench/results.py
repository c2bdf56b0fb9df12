"""Finished measurements of a bench on disk, a JSON line each, so that one that is cut off goes on where it was.

The first line says what is measured. A measurement is appended, flushed and synced when it is made; a last line that
was cut off in mid-write is left out when the file is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from disaggkd_cli import files
from disaggkd_cli.errors import UserError

_FINISHED = {"finished": True}


class Results:
    """The measurements of one bench with one set of arguments.

    Args:
        root: the directory for them and for whatever else the bench keeps; made where it is missing.
        arguments: everything that decides what is measured, as JSON.
        fresh: leave measurements of an earlier try out. Those of a bench that came to its end always are.
        log: told what is gone on with.

    Raises:
        UserError: the directory cannot be written, or holds measurements made with other arguments.
    """

    def __init__(
        self, root: Path, arguments: dict[str, Any], *, fresh: bool = False, log: Callable[[str], None] = print
    ) -> None:
        self.root = root
        self.path = root / "results.jsonl"
        arguments = json.loads(json.dumps(arguments))
        try:
            root.mkdir(parents=True, exist_ok=True)
            lines = _read(self.path)
            if lines and lines[0].get("arguments") != arguments and not fresh:
                told = _differences(lines[0].get("arguments") or {}, arguments)
                raise UserError(
                    f"--results {root}: holds measurements made with other arguments ({told}); name another directory, "
                    "or add --fresh"
                )
            self._records = [line for line in lines[1:] if line != _FINISHED]
            if lines and (fresh or _FINISHED in lines):
                os.replace(self.path, self.path.with_suffix(".previous.jsonl"))
                self._records, lines = [], []
            if self._records:
                log(f"going on after {len(self._records)} measurements in {self.path} (--fresh starts anew)")
            self._write([{"arguments": arguments, "started": time.strftime("%Y-%m-%d %H:%M:%S")}, *self._records])
        except OSError as error:
            raise UserError(f"--results {root}: cannot be written: {error.strerror}") from None

    def find(self, **key: Any) -> dict[str, Any] | None:
        """Return the newest measurement whose fields have these values, or None when it is not made yet."""
        found = [one for one in self._records if all(one.get(name) == value for name, value in key.items())]
        return found[-1] if found else None

    def add(self, record: dict[str, Any]) -> dict[str, Any]:
        """Keep a measurement and return it as it will be read back."""
        record = json.loads(json.dumps(record))
        self._append(record)
        self._records.append(record)
        return record

    def finish(self) -> None:
        """Note that everything is measured: the next start with the same arguments measures anew."""
        self._append(_FINISHED)

    def _append(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _write(self, lines: list[dict[str, Any]]) -> None:
        files.write_text(self.path, "".join(json.dumps(line) + "\n" for line in lines))


def default_root(run_dir: str, bench: str, arguments: dict[str, Any]) -> Path:
    """Return the directory beside a config's run_dir where measurements with these arguments lie."""
    digest = hashlib.sha256(json.dumps(arguments, sort_keys=True).encode()).hexdigest()[:8]
    path = Path(run_dir).expanduser()
    return path.with_name(f"{path.name}-bench") / f"{bench}-{digest}"


def _read(path: Path) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    if not path.exists():
        return lines
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            break
        if not isinstance(line, dict):
            break
        lines.append(line)
    return lines


def _differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return ", ".join(names) or "none recorded"
