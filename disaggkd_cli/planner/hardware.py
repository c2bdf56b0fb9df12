"""The hardware catalogue: GPUs and nodes by name, extensible by the user's own YAML file, nonsense refused."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from disaggkd_cli.errors import UserError

_SHIPPED = Path(__file__).with_name("hardware.yaml")
GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One accelerator. Units are in the names; NVLink, PCIe and NIC rates are one direction, per GPU.

    `gpus_per_node` and `nic_gbps` are those of the machine that it usually comes in, `price_per_hour` is as of
    `price_date`.
    """

    name: str
    memory_gib: float
    bf16_tflops: float
    matmul_tflops: float
    hbm_tb_per_s: float
    nvlink_gb_per_s: float = 0.0
    pcie_gb_per_s: float = 32.0
    architecture: str = ""
    gpus_per_node: int = 8
    nic_gbps: float = 400.0
    price_per_hour: float | None = None
    price_date: str | None = None
    unchecked: tuple[str, ...] = ()

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * GIB

    @property
    def flops(self) -> float:
        """Dense bf16 peak in FLOP/s."""
        return self.bf16_tflops * 1e12


@dataclass(frozen=True)
class Node:
    """A machine as it is rented: `gpus_per_node` of one GPU, and the network rate per GPU in Gbit/s."""

    gpu: str
    gpus_per_node: int
    nic_gbps: float


@dataclass(frozen=True)
class Catalogue:
    """GPUs and nodes by name."""

    gpus: dict[str, Gpu]
    nodes: dict[str, Node]

    def gpu(self, name: str, key: str) -> Gpu:
        """The GPU of that name; `key` is the config key to name in the message.

        Raises:
            UserError: with suggestions, when there is none.
        """
        if name in self.gpus:
            return self.gpus[name]
        raise UserError(
            f"{key}: {_unknown('GPU', name, list(self.gpus))}; add your own with hardware.catalogue=FILE.yaml"
        )

    def node(self, name: str) -> Node:
        """The node of that name.

        Raises:
            UserError: with suggestions, when there is none.
        """
        if name in self.nodes:
            return self.nodes[name]
        raise UserError(f"--hardware: {_unknown('node or GPU', name, [*self.nodes, *self.gpus])}")


def load_catalogue(extension: str | None = None) -> Catalogue:
    """Return the shipped catalogue, with the entries of the file `extension` added or overriding.

    Raises:
        UserError: when the file cannot be read, or an entry is nonsense.
    """
    shipped = _shipped()
    if extension is None:
        return shipped
    path = Path(extension).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"hardware.catalogue: {path} cannot be read: {error.strerror}") from None
    added = _parse(text, str(path))
    return Catalogue({**shipped.gpus, **added.gpus}, {**shipped.nodes, **added.nodes})


@lru_cache(maxsize=1)
def _shipped() -> Catalogue:
    return _parse(_SHIPPED.read_text(encoding="utf-8"), str(_SHIPPED))


def _parse(text: str, source: str) -> Catalogue:
    try:
        tree = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise UserError(f"{source}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(tree, dict) or not set(tree) <= {"gpus", "nodes"}:
        raise UserError(f"{source}: a hardware catalogue is a mapping with `gpus:` and `nodes:`")
    gpus = {name: _gpu(name, entry, source) for name, entry in (tree.get("gpus") or {}).items()}
    nodes = {name: _node(name, entry, source) for name, entry in (tree.get("nodes") or {}).items()}
    return Catalogue(gpus, nodes)


def _gpu(name: str, entry: Any, source: str) -> Gpu:
    entry = _mapping(name, entry, Gpu, source)
    for key in ("memory_gib", "bf16_tflops", "matmul_tflops", "hbm_tb_per_s"):
        _positive(name, entry, key, source)
    for key in ("nvlink_gb_per_s", "pcie_gb_per_s", "nic_gbps", "price_per_hour"):
        if entry.get(key) is not None and not (_is_number(entry[key]) and entry[key] >= 0):
            raise UserError(f"{source}: {name}.{key}: {entry[key]!r} must be a number, at least 0")
    if entry["matmul_tflops"] > entry["bf16_tflops"]:
        raise UserError(
            f"{source}: {name}: matmul_tflops {entry['matmul_tflops']} is above its peak bf16_tflops "
            f"{entry['bf16_tflops']}"
        )
    if "gpus_per_node" in entry:
        _whole(name, entry, "gpus_per_node", source)
    if entry.get("price_per_hour") is not None and not entry.get("price_date"):
        raise UserError(f"{source}: {name}.price_per_hour: a price needs its price_date, such as 2026-01-31")
    if entry.get("price_date") is not None:
        entry = {**entry, "price_date": str(entry["price_date"])}
    return Gpu(name=name, **{**entry, "unchecked": tuple(entry.get("unchecked") or ())})


def _node(name: str, entry: Any, source: str) -> Node:
    entry = _mapping(name, entry, Node, source)
    _whole(name, entry, "gpus_per_node", source)
    if not (_is_number(entry.get("nic_gbps")) and entry["nic_gbps"] >= 0):
        raise UserError(
            f"{source}: {name}.nic_gbps: {entry.get('nic_gbps')!r} must be a number, at least 0 (0: one node)"
        )
    return Node(**entry)


def _mapping(name: str, entry: Any, kind: type, source: str) -> dict[str, Any]:
    known = {one.name for one in fields(kind)} - {"name"}
    if not isinstance(entry, dict):
        raise UserError(f"{source}: {name} must be a mapping of {', '.join(sorted(known))}")
    for key in entry:
        if key not in known:
            raise UserError(f"{source}: {name}: {_unknown('field', str(key), sorted(known))}")
    return entry


def _positive(name: str, entry: dict[str, Any], key: str, source: str) -> None:
    if key not in entry:
        raise UserError(f"{source}: {name} lacks {key}")
    if not (_is_number(entry[key]) and entry[key] > 0):
        raise UserError(f"{source}: {name}.{key}: {entry[key]!r} must be a number above 0")


def _whole(name: str, entry: dict[str, Any], key: str, source: str) -> None:
    _positive(name, entry, key, source)
    if entry[key] != int(entry[key]):
        raise UserError(f"{source}: {name}.{key}: {entry[key]!r} must be a whole number")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def _unknown(what: str, name: str, known: list[str]) -> str:
    folded = {candidate.lower(): candidate for candidate in known}
    near = [folded[match] for match in difflib.get_close_matches(name.lower(), list(folded), n=3, cutoff=0.4)]
    near += [candidate for candidate in known if name.lower() in candidate.lower() and candidate not in near]
    hint = f"did you mean {' or '.join(near[:3])}?" if near else f"known are {', '.join(known)}"
    return f"{name!r} is no known {what}; {hint}"
