"""Every key of the schema with its type, default, choices and text, read from the schema itself."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import json
import typing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from disaggkd_cli import __version__
from disaggkd_cli.config.load import dataclass_of
from disaggkd_cli.config.schema import CHOICES, Config
from disaggkd_cli.errors import UserError


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        name: dotted, such as `train.steps`; a section's own entry is its name, such as `train`.
        type: as the schema writes it; `section` for a section.
        default: as YAML writes it; "" for a section that is there by default.
        choices: the words it takes, where it takes one of a few.
        text: what it does.
        since: the version that has had it first.
    """

    name: str
    type: str
    default: str
    choices: tuple[str, ...]
    text: str
    since: str


@cache
def reference() -> dict[str, Key]:
    """Return every key by name, in the order of the schema; a section stands before its keys."""
    return {key.name: key for key in _keys(Config, "")}


def explain(name: str) -> str:
    """Return what a key does, or what a section holds, as plain text.

    Raises:
        UserError: there is no such key; the nearest names are said.
    """
    keys = reference()
    if name not in keys:
        ends = [known for known in keys if known.rsplit(".", 1)[-1] == name.rsplit(".", 1)[-1]]
        near = ends or difflib.get_close_matches(name, keys, n=3)
        mend = f"did you mean {' or '.join(near)}?" if near else f"sections are {', '.join(sections())}"
        raise UserError(f"{name}: there is no such key; {mend}")
    key = keys[name]
    lines = [f"{key.name}  ({key.type})", "", key.text]
    if key.default:
        lines += ["", f"default: {key.default}"]
    if key.choices:
        lines.append(f"choices: {', '.join(key.choices)}")
    below = [other for other in keys.values() if other.name.startswith(name + ".")]
    if below:
        width = max(len(other.name) for other in below)
        lines += ["", *(f"  {other.name:{width}}  {_first_sentence(other.text)}" for other in below)]
    return "\n".join([*lines, "", f"since {key.since}"])


def sections() -> list[str]:
    """Return the names of the top-level sections and keys."""
    return [name for name in reference() if "." not in name]


def complete(beginning: str) -> list[tuple[str, str]]:
    """Return what `beginning` of an override may go on as, each with a word of help: keys, then values after `=`.

    A section that is the only choice is left out for its keys, since shells put a space behind an only choice.
    """
    key, equals, value = beginning.partition("=")
    if equals:
        return [(f"{key}={word}", text) for word, text in complete_value(key, value)]
    keys = reference()
    found = [name for name in keys if name.startswith(key) and name.count(".") == key.count(".")]
    if len(found) == 1 and keys[found[0]].type == "section":
        found = [name for name in keys if name.rpartition(".")[0] == found[0]]
    return [(name + ("." if keys[name].type == "section" else "="), _first_sentence(keys[name].text)) for name in found]


def complete_value(key: str, beginning: str) -> list[tuple[str, str]]:
    """Return the words that a key takes and that begin so; none where it takes more than a few."""
    found = reference().get(key)
    words = found.choices or (("true", "false") if found.type == "bool" else ()) if found else ()
    return [(word, "") for word in words if word.startswith(beginning)]


def as_markdown() -> str:
    """Return the reference page."""
    parts = [
        "# Keys of the configuration",
        "",
        "Made from the schema in `disaggkd_cli/config/` by `python scripts/config_reference.py --write`; `disaggkd "
        "explain KEY` says the same of one key, `disaggkd run CONFIG --print-config` prints a config with every "
        "default.",
    ]
    tables = {"": [key for key in reference().values() if "." not in key.name and key.type != "section"]}
    for section in (key for key in reference().values() if key.type == "section"):
        below = [key for key in reference().values() if key.name.rpartition(".")[0] == section.name]
        tables[section.name] = [key for key in below if key.type != "section"]
    for name, keys in tables.items():
        title, text = (f"## `{name}`", reference()[name].text) if name else ("## At the top", "")
        parts += ["", title, "", *([text, ""] if text else [])]
        parts += ["| key | default | what it does | since |", "|---|---|---|---|"]
        for key in keys:
            choices = f" One of {', '.join(f'`{word}`' for word in key.choices)}." if key.choices else ""
            text = (key.text + choices).replace("|", "\\|")
            parts.append(f"| `{key.name}` | {f'`{key.default}`' if key.default else ''} | {text} | {key.since} |")
    return "\n".join(parts) + "\n"


def _first_sentence(text: str) -> str:
    return text.split(". ")[0].rstrip(".")


def _keys(section: type, prefix: str) -> list[Key]:
    texts = _field_texts(section)
    annotations = typing.get_type_hints(section)
    found = []
    for entry in dataclasses.fields(section):
        name = prefix + entry.name
        inner = dataclass_of(annotations[entry.name])
        text = texts.get(entry.name) or " ".join((inspect.getdoc(inner) or "").split() if inner else ())
        default = "" if inner and entry.default_factory is not dataclasses.MISSING else _as_yaml(_default(entry))
        kind = "section" if inner else str(entry.type)
        found.append(Key(name, kind, default, tuple(CHOICES.get(name, ())), text, _since(name)))
        if inner:
            found += _keys(inner, name + ".")
    return found


def _default(entry: dataclasses.Field) -> Any:
    if entry.default_factory is not dataclasses.MISSING:
        return entry.default_factory()
    return entry.default


def _as_yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=1000).strip().removesuffix("...").strip()
    return text


@cache
def _field_texts(section: type) -> dict[str, str]:
    """Return the text below each field of a section; Python keeps no docstrings of fields, so the source is read."""
    found: dict[str, str] = {}
    body = ast.parse(inspect.getsource(section)).body[0].body
    for field, after in zip(body, body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
            if isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
                found[field.target.id] = " ".join(after.value.value.split())
    return found


@cache
def _released() -> dict[str, list[str]]:
    return json.loads((Path(__file__).parent / "released_keys.json").read_text(encoding="utf-8"))


def _since(name: str) -> str:
    """Return the first released version that lists the key, or this version."""
    return next((version for version, names in _released().items() if name in names), __version__)
