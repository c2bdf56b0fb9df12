"""The list of wrong changes fits the tree, and what tries them tells noticed from not noticed."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "scripts"))
import mutants  # noqa: E402

CODE = "def least(a, b):\n    return a if a < b else b\n"
TESTS = "from disaggkd_cli.toy import least\n\n\ndef test_least():\n    assert least(1, 2) == least(2, 1) == 1\n"


def listed(tmp_path, **entries):
    path = tmp_path / "mutants.yaml"
    path.write_text(
        yaml.safe_dump({name: {"file": "disaggkd_cli/toy.py", **one} for name, one in entries.items()}, sort_keys=False)
    )
    return path


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    for path, text in {"disaggkd_cli/__init__.py": "", "disaggkd_cli/toy.py": CODE, "tests/test_toy.py": TESTS}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


TEST = ["tests/test_toy.py::test_least"]


def test_at_least_sixty_changes_are_listed_and_each_fits_the_tree():
    found = mutants.read_list()
    assert len(found) >= 60 and len({mutant.name for mutant in found}) == len(found)
    assert mutants.misfits(found, ROOT) == []


def test_what_does_not_fit_is_named(tree, tmp_path, capsys):
    entries = {
        "gone": {"old": "a > b", "new": "a < b", "tests": TEST},
        "twice": {"old": "a", "new": "c", "tests": TEST},
        "no test": {"old": "a < b", "new": "a > b", "tests": ["tests/test_toy.py::test_most"]},
        "no change": {"old": "a < b", "new": "a < b", "tests": TEST},
    }
    assert mutants.main([], tree, listed(tmp_path, **entries)) == 2
    said = capsys.readouterr().err
    assert "gone: 'a > b' should occur once in disaggkd_cli/toy.py, and is found 0 times" in said
    assert "twice: 'a' should occur once" in said
    assert "no test: there is no test tests/test_toy.py::test_most" in said
    assert "no change: changes nothing" in said


def test_noticed_not_noticed_and_noticed_before(tree, tmp_path):
    """In a process of its own, since it forks."""
    entries = {
        "noticed": {"old": "a < b", "new": "a > b", "tests": TEST},
        "not noticed": {"old": "a < b", "new": "a <= b", "tests": TEST},
        "broken": {"old": "def least(a, b):", "new": "def least(a, b)", "tests": TEST},
    }
    path = listed(tmp_path, **entries)
    roots = f"Path({str(tree)!r}), Path({str(path)!r})"
    code = "import sys, pytest, mutants; from pathlib import Path; mutants._import_libraries = lambda: None; "
    code += f"sys.exit(mutants.main([], {roots}))"
    outputs = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "scripts", capture_output=True, text=True)
        assert done.returncode == 1, done.stderr
        outputs.append(done.stdout)
    assert "[1/3] noticed: noticed (" in outputs[0]
    assert "[2/3] NOT NOTICED: not noticed (" in outputs[0]
    assert "[3/3] its tests could not run (pytest's exit code 4): broken (" in outputs[0]
    assert "1 of 3 changes are noticed" in outputs[0]
    assert "3 changes, 1 of them noticed before" in outputs[1] and "[1/2] NOT NOTICED" in outputs[1]
    assert (tree / "disaggkd_cli" / "toy.py").read_text() == CODE, "only copies are changed"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_listed_change_is_noticed():
    script = ROOT / "scripts" / "mutants.py"
    assert subprocess.run([sys.executable, script], cwd=ROOT).returncode == 0
