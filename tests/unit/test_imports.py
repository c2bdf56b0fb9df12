"""Imports run downwards only, the command line starts without torch, and files stay small."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "disaggkd_cli"

LEVELS = [
    {"errors", "exits", "faults", "files", "locks"},
    {
        "units",
        "addresses",
        "gpus",
        "collective_texts",
        "collective_timeouts",
        "nodelist",
        "secret",
        "wire",
    },
    {"terminal"},
    {"verbosity"},
    {"page", "model_files", "layouts"},
    {"losses"},
    {"config"},
    {"data"},
    {"models", "transport"},
    {"on_policy"},
    {"training"},
    {"planner"},
    {"launch"},
    {"runtime", "supervise"},
    {"replica"},
    {"teacher", "student", "report", "export_command"},
    {"bench", "checks", "recipes", "environment"},
    {"jobs"},
    {"cli"},
    {"__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}


def modules():
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str, known: set[str]) -> set[str]:
    """Return which of the modules `known` a source imports by name, at its head, in functions, or for types only."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute here"
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & known
            named_otherwise = len(submodules) < len(node.names)
            found |= submodules | ({node.module} & known if named_otherwise else set())
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & known
    return found


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or round about."""

    def reachable(start: str) -> set[str]:
        seen, ahead = set(), list(graph[start])
        while ahead:
            name = ahead.pop()
            if name not in seen:
                seen.add(name)
                ahead += graph[name]
        return seen

    reach = {name: reachable(name) for name in graph}
    found = {tuple(sorted({other for other in reach[name] if name in reach[other]})) for name in graph}
    return sorted(list(group) for group in found if group)


def import_graph() -> dict[str, set[str]]:
    paths = {name_of(path): path for path in modules()}
    return {name: imports_of(path.read_text(), set(paths)) - {name} for name, path in paths.items()}


def imported_rooms(path: Path) -> set[str]:
    known = {name_of(other) for other in modules()}
    return {name.split(".")[1] for name in imports_of(path.read_text(), known) if name != "disaggkd_cli"}


def test_no_module_imports_itself_round_about():
    assert circles(import_graph()) == []


def test_a_circle_is_seen_wherever_the_import_stands():
    known = {"disaggkd_cli.a", "disaggkd_cli.b", "disaggkd_cli.c"}
    sources = {
        "disaggkd_cli.a": "from disaggkd_cli.b import thing",
        "disaggkd_cli.b": "def f():\n    from disaggkd_cli import c",
        "disaggkd_cli.c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import disaggkd_cli.a",
    }
    graph = {name: imports_of(source, known) for name, source in sources.items()}
    assert circles(graph) == [sorted(known)]
    assert circles(graph | {"disaggkd_cli.c": set()}) == []


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_downwards(path):
    room = room_of(path)
    if room == "__init__":
        return
    assert room in LEVEL, f"{room} has no level yet; give it one"
    for other in imported_rooms(path) - {room}:
        assert LEVEL[other] < LEVEL[room], f"{room} imports {other}, which lies no lower"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_stay_small(path):
    assert len(path.read_text().splitlines()) <= 450


@pytest.mark.parametrize(
    "module",
    [
        "cli",
        "jobs",
        "config",
        "losses.divergences",
        "losses.tiling",
        "planner.loss",
        "errors",
        "launch",
        "supervise",
        "training.run_directory",
    ],
)
def test_no_torch_before_a_rank_needs_it(module):
    code = f"import sys, disaggkd_cli.{module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


MOVERS = {"send", "recv", "isend", "irecv", "recv_anysource", "batch_isend_irecv"}
MAY_MOVE = {"transport/pair.py", "transport/nccl_payloads.py", "bench/link.py"}
GROUPS = ("group", "dist", "pair", "_group", "process_group")


def movers_in(source: str) -> set[str]:
    """Return how a source could move tensors between ranks: a mover called by name, or by a name made up on the way."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            found |= {node.attr} & MOVERS
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            found |= {alias.name for alias in node.names} & MOVERS
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            owner = getattr(node.args[0], "id", None) or getattr(node.args[0], "attr", "")
            name = node.args[1].values[0] if isinstance(node.args[1], ast.JoinedStr) else node.args[1]
            begins = name.value if isinstance(name, ast.Constant) else ""
            whole = isinstance(node.args[1], ast.Constant)
            if begins in MOVERS if whole else owner in GROUPS and any(mover.startswith(begins) for mover in MOVERS):
                found.add(f"getattr({owner}, {begins}...)")
    return found


def test_only_the_links_pairs_move_tensors():
    for path in modules():
        moving = movers_in(path.read_text())
        if path.relative_to(PACKAGE).as_posix() in MAY_MOVE:
            assert moving, f"{path} moves nothing: take it off the list"
        else:
            assert not moving, path


@pytest.mark.parametrize(
    "planted",
    [
        "group.send([tensor], 1, 0).wait()",
        "self._pair.group.recv([tensor], 0, 0)",
        "dist.isend(tensor, 1)",
        "from torch.distributed import batch_isend_irecv",
        'getattr(anything, "irecv")(tensor, 0)',
        "for call in calls:\n    getattr(self._group, call)([tensor], 1, 0)",
        "start = dist.irecv\nstart(tensor, 0)",
    ],
)
def test_a_mover_elsewhere_is_found(planted):
    assert movers_in(planted)


def test_no_pickle_and_no_object_collectives():
    for path in modules():
        tree = ast.parse(path.read_text())
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert "pickle" not in imported, path
        verbs = ("send", "recv", "broadcast", "gather", "all_gather", "scatter")
        collectives = {f"{verb}_object{end}" for verb in verbs for end in ("", "_list")}
        assert not names & collectives, path
