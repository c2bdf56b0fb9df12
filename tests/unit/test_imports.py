"""Imports run downwards only, the command line starts without torch, and files stay small."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "disaggkd_cli"

LEVELS = [
    {"errors", "faults"},
    {"units", "addresses", "nodelist"},
    {"page", "model_files"},
    {"losses"},
    {"config", "layouts"},
    {"data"},
    {"models", "transport"},
    {"training"},
    {"planner"},
    {"launch"},
    {"runtime", "supervise"},
    {"replica"},
    {"teacher", "student", "report"},
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


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "disaggkd_cli":
                names = [f"disaggkd_cli.{alias.name}" for alias in node.names if alias.name != "__version__"]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("disaggkd_cli.")}
    return rooms


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


def test_only_the_link_moves_tensors():
    movers = {".send(", ".recv(", "isend(", "irecv(", "batch_isend_irecv"}
    for path in modules():
        if path.relative_to(PACKAGE).as_posix() in ("transport/link.py", "bench/link.py"):
            continue
        text = path.read_text()
        assert not [mover for mover in movers if mover in text], path


def test_no_pickle_and_no_object_collectives():
    for path in modules():
        tree = ast.parse(path.read_text())
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert "pickle" not in imported, path
        verbs = ("send", "recv", "broadcast", "gather", "all_gather", "scatter")
        collectives = {f"{verb}_object{end}" for verb in verbs for end in ("", "_list")}
        assert not names & collectives, path
