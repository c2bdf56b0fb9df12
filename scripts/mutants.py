"""Small wrong changes to the code, each of which a test must notice.

    python scripts/mutants.py [--only WORDS ...] [--list] [--fresh] [--results FILE]

`mutants.yaml` beside this file lists them: a file, an old text that occurs in it once, a new text, and the tests that
must fail with it. Each change is made in a temporary copy of the tree, where its tests then run in a fork of this
process, which has the libraries imported. A line for each says how it went; the exit code is 1 when a change was not
noticed, and 2 when the list no longer fits the tree. Those noticed before, in the same code by the same tests, are
passed over; `--fresh` tries them anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_name("mutants.yaml")
COPIED = ("disaggkd_cli", "tests", "scripts", "configs", "docs", "pyproject.toml", "README.md", "Makefile")
_TEST_SECONDS = 120


@dataclass(frozen=True)
class Mutant:
    """One wrong change.

    Attributes:
        name: what goes wrong with it.
        file: of the tree.
        old, new: `old` occurs once in the file.
        tests: pytest's names of those that must notice; a file's name means any of its tests.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, root: Path) -> str:
        """Return the file's text with the change made.

        Raises:
            ValueError: the old text is not there, or more than once.
        """
        path = root / self.file
        text = path.read_text() if path.exists() else ""
        if text.count(self.old) != 1:
            found = f"{text.count(self.old)} times" if text else "nowhere, since there is no such file"
            raise ValueError(f"{self.name}: {self.old!r} should occur once in {self.file}, and is found {found}")
        if self.old == self.new:
            raise ValueError(f"{self.name}: changes nothing")
        return text.replace(self.old, self.new)

    def key(self, root: Path) -> str:
        """Return what the verdict depends on as one hash: the change, the code, and the named tests' files."""
        digest = hashlib.sha256(repr(self).encode())
        files = [*sorted((root / "disaggkd_cli").rglob("*.py")), *{root / test.split("::")[0] for test in self.tests}]
        for path in files:
            digest.update(path.read_bytes())
        return digest.hexdigest()


def read_list(path: Path = LIST) -> list[Mutant]:
    """Return the list, in its order."""
    entries = yaml.safe_load(path.read_text())
    return [
        Mutant(name, entry["file"], str(entry["old"]), str(entry["new"]), tuple(entry["tests"]))
        for name, entry in entries.items()
    ]


def misfits(mutants: Sequence[Mutant], root: Path) -> list[str]:
    """Return what no longer fits the tree: texts that are not there, tests that are not there."""
    found = []
    for mutant in mutants:
        try:
            mutant.applied(root)
        except ValueError as error:
            found.append(str(error))
        for test in mutant.tests:
            path, _, name = test.partition("::")
            text = (root / path).read_text() if (root / path).is_file() else ""
            if not text or (name and f"def {name.split('[')[0]}(" not in text):
                found.append(f"{mutant.name}: there is no test {test}")
    return found


def copy_tree(root: Path, target: Path) -> None:
    """Copy what tests need of the tree."""
    for name in COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "assets.*"))
        elif (root / name).exists():
            shutil.copy(root / name, target / name)


def run_tests(tree: Path, tests: Sequence[str]) -> int:
    """Run tests of a tree in a fork of this process and return pytest's exit code; their output goes to a file."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            output = os.open(tree / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(tree)
            sys.path.insert(0, str(tree))
            import pytest

            options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "slow or not slow", f"--timeout={_TEST_SECONDS}"]
            code = int(pytest.main([*options, *tests]))
            sys.stdout.flush()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def noticed_by(mutant: Mutant, tree: Path) -> str:
    """Make the change in a copy of the tree and return `noticed`, `NOT NOTICED`, or what went wrong otherwise."""
    path = tree / mutant.file
    before = path.read_text()
    path.write_text(mutant.applied(tree))
    try:
        code = run_tests(tree, mutant.tests)
    finally:
        path.write_text(before)
    if code == 0:
        return "NOT NOTICED"
    # With 2 and above pytest could not run the tests at all: the change broke an import, or a name is wrong.
    return "noticed" if code == 1 else f"its tests could not run (pytest's exit code {code})"


def main(arguments: Sequence[str] | None = None, root: Path = ROOT, listed: Path = LIST) -> int:
    """Try the changes and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="WORDS", help="those whose name or file has these")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--fresh", action="store_true", help="try those again that were noticed before")
    parser.add_argument("--results", type=Path, default=root / "runs" / "mutants.jsonl", metavar="FILE")
    options = parser.parse_args(arguments)
    mutants = [m for m in read_list(listed) if all(word in f"{m.name} {m.file}" for word in options.only)]
    if options.list:
        print("\n".join(mutant.name for mutant in mutants))
        return 0
    wrong = misfits(mutants, root)
    if wrong or not mutants:
        print("\n".join(wrong) or "no change has such a name", file=sys.stderr)
        return 2
    return _try_all(mutants, root, options.results, options.fresh)


def _try_all(mutants: Sequence[Mutant], root: Path, results: Path, fresh: bool) -> int:
    known = set() if fresh or not results.exists() else {json.loads(x)["key"] for x in results.read_text().splitlines()}
    results.parent.mkdir(parents=True, exist_ok=True)
    keys = {mutant: mutant.key(root) for mutant in mutants}
    due = [mutant for mutant in mutants if keys[mutant] not in known]
    print(f"{len(mutants)} changes, {len(mutants) - len(due)} of them noticed before", flush=True)
    sys.dont_write_bytecode = True
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        tree = Path(name)
        copy_tree(root, tree)
        _import_libraries()
        if due and (code := run_tests(tree, sorted({test for mutant in due for test in mutant.tests}))):
            print(f"without any change the tests end with {code}:\n{_tail(tree)}", file=sys.stderr)
            return 2
        bad = 0
        with results.open("a") as file:
            for number, mutant in enumerate(due, 1):
                began = time.monotonic()
                verdict = noticed_by(mutant, tree)
                print(f"[{number}/{len(due)}] {verdict}: {mutant.name} ({time.monotonic() - began:.1f} s)", flush=True)
                if verdict == "noticed":
                    file.write(json.dumps({"name": mutant.name, "key": keys[mutant]}) + "\n")
                    file.flush()
                else:
                    bad += 1
                    print(_tail(tree) if verdict != "NOT NOTICED" else f"  {mutant.old!r} -> {mutant.new!r}")
    print(f"{len(mutants) - bad} of {len(mutants)} changes are noticed")
    return int(bad > 0)


def _import_libraries() -> None:
    """Import what costs time and never changes, before the forks."""
    import pytest  # noqa: F401
    import torch.distributed.fsdp  # noqa: F401
    import transformers.models.auto.modeling_auto  # noqa: F401


def _tail(tree: Path) -> str:
    path = tree / "output.txt"
    return "\n".join(path.read_text().splitlines()[-15:]) if path.exists() else ""


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
