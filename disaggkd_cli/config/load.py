"""Read a YAML file and dotted overrides into a `Config`, reporting every problem at once.

The file is data: it is parsed with safe YAML semantics, its size, depth and aliases are bounded, duplicate keys are
refused, and resolvers (`${oc.env:...}` and the like) are refused, so that reading a config never reads anything else.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from disaggkd_cli.config.check import check
from disaggkd_cli.config.schema import Config
from disaggkd_cli.errors import UserError

MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 12
_RESOLVER = re.compile(r"\$\{[^}]*:")


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML without aliases (no expansion bombs), without duplicate keys, with a bounded depth."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            event = self.peek_event()
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not allowed here", event.start_mark)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, f"nested deeper than {MAX_DEPTH} levels", mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict:
        seen: set = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


# YAML 1.1 reads 5e-5 as text; people mean the number.
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
# YAML 1.1 reads on, off, yes and no as truth values; here `packing: off` is a word.
for _letter in "oOyYnN":
    _StrictLoader.yaml_implicit_resolvers[_letter] = [
        resolver
        for resolver in _StrictLoader.yaml_implicit_resolvers.get(_letter, [])
        if resolver[0] != "tag:yaml.org,2002:bool"
    ]


def load(path: str | Path, overrides: Sequence[str] = (), *, running: bool = False) -> Config:
    """Read `path`, apply dotted `overrides` (`train.steps=20`) from left to right, and return the typed config.

    Args:
        path: a YAML file.
        overrides: `key=value` texts; the value is YAML.
        running: also check what only a run needs (paths that exist, required keys); see `check`.

    Raises:
        UserError: listing every problem found, one a line: unreadable file, unknown key (with the nearest name),
            wrong type, value out of range, keys that contradict each other.
    """
    tree = _read_file(Path(path))
    problems: list[str] = []
    for override in overrides:
        problem = _apply_override(tree, override)
        if problem:
            problems.append(problem)
    merged = OmegaConf.structured(Config)
    for key, value in _leaves(tree, Config, "", problems):
        problem = _assign(merged, key, value)
        if problem:
            problems.append(problem)
    config = None
    try:
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        problems.append(_first_line(error))
    if config is not None:
        unparsed = {problem.split(":", 1)[0] for problem in problems}
        problems += [text for text in check(config, running=running) if text.split(":", 1)[0] not in unparsed]
    if problems:
        raise UserError(f"{path}: {_count(problems)}\n" + "\n".join(f"  {problem}" for problem in problems))
    return config


def to_yaml(config: Config) -> str:
    """Return the resolved config as YAML that `load` reads back to the same config."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)


def parse_yaml(text: str, source: str) -> Any:
    """Parse one bounded YAML document that holds only data.

    Raises:
        UserError: naming `source` and the line.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}, line {mark.line + 1}" if mark else source
        raise UserError(f"{where}: not valid YAML here: {getattr(error, 'problem', None) or error}") from None


def _count(problems: list[str]) -> str:
    return "one problem" if len(problems) == 1 else f"{len(problems)} problems"


def _read_file(path: Path) -> dict:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UserError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB; a config is a short YAML file")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = _near_file(path)
        raise UserError(f"{path}: there is no such config file{near}") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a directory; name the YAML file in it") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text; a config is a YAML file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    tree = parse_yaml(text, str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{path}: holds a {type(tree).__name__}, but a config is a mapping of sections (teacher: ...)")
    return tree


def _near_file(path: Path) -> str:
    folder = path.parent
    names = [entry.name for entry in folder.iterdir() if entry.suffix in (".yaml", ".yml")] if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    return f"; did you mean {folder / near[0]}?" if near else ""


def _apply_override(tree: dict, override: str) -> str | None:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        return f"{override!r}: an override is written key=value, such as train.steps=20"
    try:
        value = parse_yaml(text, f"override {override!r}") if text.strip() else None
    except UserError as error:
        if not (key in known_keys() and _is_text(annotation_of(key))):
            return str(error)
        value = text.strip()  # such as [::1]:29500, which is an address and no YAML
    node = tree
    *parents, last = key.split(".")
    for parent in parents:
        if not isinstance(node.get(parent), dict):
            node[parent] = {}
        node = node[parent]
    node[last] = value
    return None


def _is_text(annotation: Any) -> bool:
    return annotation is str or set(typing.get_args(annotation)) == {str, type(None)}


def dataclass_of(annotation: Any) -> type | None:
    """Return the dataclass that an annotation (possibly optional) names, or None."""
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and dataclasses.is_dataclass(candidate):
            return candidate
    return None


def known_keys(schema: type = Config, prefix: str = "") -> list[str]:
    """Return every dotted key of the schema, sections included."""
    keys = []
    for name, annotation in typing.get_type_hints(schema).items():
        keys.append(prefix + name)
        section = dataclass_of(annotation)
        if section:
            keys += known_keys(section, f"{prefix}{name}.")
    return keys


def _leaves(tree: dict, schema: type, prefix: str, problems: list[str]) -> Iterator[tuple[str, Any]]:
    hints = typing.get_type_hints(schema)
    for name, value in tree.items():
        key = prefix + name
        if name not in hints:
            problems.append(f"{key}: there is no such key{_did_you_mean(key, hints, prefix)}")
            continue
        section = dataclass_of(hints[name])
        if section is None:
            yield key, value
        elif isinstance(value, dict):
            if hints[name] is not section:
                yield key, section()
            yield from _leaves(value, section, key + ".", problems)
        elif value is None and hints[name] is not section:
            yield key, None
        elif value is not None:
            names = ", ".join(typing.get_type_hints(section))
            problems.append(f"{key}: is a section, not a value; it holds {names}")


def _did_you_mean(key: str, hints: dict, prefix: str) -> str:
    every = known_keys()
    same_name = [known for known in every if known.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    near = [prefix + name for name in difflib.get_close_matches(key[len(prefix) :], hints, n=1)]
    near = near or same_name[:1] or difflib.get_close_matches(key, every, n=1)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; here are: {', '.join(sorted(hints))}"


def _assign(merged: Any, key: str, value: Any) -> str | None:
    for text in _texts(value):
        if _RESOLVER.search(text):
            return f"{key}: {text!r} calls a resolver; a config is plain data, so write the value itself"
    try:
        OmegaConf.update(merged, key, value, merge=False)
        OmegaConf.select(merged, key, throw_on_missing=True)
    except OmegaConfBaseException as error:
        expected = words_of_type(annotation_of(key))
        if expected is None:
            return f"{key}: {_first_line(error)}"
        return f"{key}: is {_shown(value)}, but must be {expected}"
    return None


def annotation_of(key: str) -> Any:
    """Return the type that the schema gives a dotted key which is there."""
    *sections, last = key.split(".")
    schema = Config
    for name in sections:
        schema = dataclass_of(typing.get_type_hints(schema)[name])
    return typing.get_type_hints(schema)[last]


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


def words_of_type(annotation: Any) -> str | None:
    """Return what a value of a type is called, such as `a whole number or null`; None where it cannot be said."""
    if annotation in _WORDS:
        return _WORDS[annotation]
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is list:
        each = {str: "texts", int: "whole numbers", float: "numbers"}.get(inner[0], "values")
        return f"a list of {each}"
    if origin is dict:
        return "a mapping of names to values"
    words = [words_of_type(one) for one in inner]
    return " or ".join(words) if words and None not in words else None


def _shown(value: Any) -> str:
    text = "null" if value is None else yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
    kinds = {dict: "the mapping", list: "the list", str: "the text"}
    return f"{kinds.get(type(value), '')} {text if len(text) <= 60 else text[:57] + '...'}".strip()


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _texts(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _texts(entry)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
