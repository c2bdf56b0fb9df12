"""Train, validation and test: which split a file is of, by its own name and by its folders' names."""

from __future__ import annotations

import re
from pathlib import Path

from disaggkd_cli.errors import UserError

HELD_OUT = ("validation", "test")
"""Splits that are never trained on unasked, the one to evaluate on first."""
_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval", "evaluation"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_WORDS = "|".join(_NAMES)
_IN_FILE_NAME = re.compile(rf"^({_WORDS})(?=[-_. \d]|$)|(?<=[-_. ])({_WORDS})$", re.IGNORECASE)


def split_of(file: Path, base: Path) -> str | None:
    """The split that a folder below `base` is named after, or the beginning or the end of the file's own name."""
    *folders, name = file.relative_to(base).parts
    for folder in folders:
        if folder.lower() in _NAMES:
            return _NAMES[folder.lower()]
    match = _IN_FILE_NAME.search(name.split(".")[0])
    return _NAMES[(match[1] or match[2]).lower()] if match else None


def canonical(split: str) -> str:
    """The usual name of a split."""
    return _NAMES.get(split.lower(), split)


def files_of_split(files: list[Path], base: Path, split: str) -> list[Path]:
    """Those of one split."""
    return [file for file in files if split_of(file, base) == canonical(split)]


def training_files(files: list[Path], base: Path) -> list[Path]:
    """Those to train on: of the train split where there is one, else those of no split; all where nothing else is."""
    of = {file: split_of(file, base) for file in files}
    for wanted in ("train", None):
        if chosen := [file for file in files if of[file] == wanted]:
            return chosen
    return files


def held_out_files(files: list[Path], base: Path) -> list[Path]:
    """Those to evaluate on, of the first held-out split that there is."""
    return next((chosen for split in HELD_OUT if (chosen := files_of_split(files, base, split))), [])


def held_out_name(names: list[str]) -> str | None:
    """Of the names of a data set's splits the one to evaluate on."""
    return next((name for split in HELD_OUT for name in names if canonical(name) == split), None)


def require_training_split(files: list[Path], base: Path, key: str) -> None:
    """Refuse a directory that holds nothing but held-out texts.

    Raises:
        UserError: it does.
    """
    splits = {split_of(file, base) for file in files}
    if splits and splits <= set(HELD_OUT):
        raise UserError(
            f"{key}: {base} holds only texts to be held out ({', '.join(sorted(map(str, splits)))}); to train on them "
            f"all the same name the files, for instance {key}='{files[0].parent}/{files[0].name}'"
        )
