"""Commented configs to start from: the shipped ones, listed by name and written where a person wants them."""

from __future__ import annotations

import difflib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from disaggkd_cli.errors import UserError

_CHECKOUT = Path(__file__).parents[1] / "configs"


@dataclass(frozen=True)
class Recipe:
    """One shipped config: its name, what it is for, and where it lies."""

    name: str
    purpose: str
    path: Path


def recipes() -> dict[str, Recipe]:
    """Return the shipped configs by name. The first comment of each says what it is for."""
    installed = Path(sysconfig.get_path("data")) / "share" / "disaggkd" / "configs"
    folder = _CHECKOUT if _CHECKOUT.is_dir() else installed
    paths = sorted(folder.glob("*.yaml"))
    return {path.stem: Recipe(path.stem, _purpose(path), path) for path in paths}


def write_recipe(name: str, target: Path) -> None:
    """Write the recipe called `name` to `target`.

    Raises:
        UserError: there is no such recipe; the file exists; it cannot be written.
    """
    known = recipes()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        mend = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        raise UserError(f"init {name}: there is no such recipe; {mend}")
    try:
        with open(target, "x", encoding="utf-8") as file:
            file.write(known[name].path.read_text(encoding="utf-8"))
    except FileExistsError:
        raise UserError(f"{target}: is there already and stays as it is; choose another name with --output") from None
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror}") from None


def _purpose(path: Path) -> str:
    words: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        words.append(line.removeprefix("#").strip())
    text = " ".join(words)
    return text.split(". ")[0].rstrip(".")
