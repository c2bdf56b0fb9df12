"""docs/extending.md adds what it says: its diffs apply to the package as it is, and its lines of Python use them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from disaggkd_cli.errors import UserError

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "extending.md"
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


def sections() -> dict[str, str]:
    """Title -> text of each section that adds something."""
    _, *rest = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {text.partition("\n")[0]: text for text in rest}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def apply_diff(diff: str, root: Path) -> None:
    """Apply a unified diff below `root`. Every line of context and every removed line must stand where the diff says.

    A file's line numbers may have shifted as a whole, since other diffs came before: then a hunk's old lines must stand
    exactly once in the file.
    """
    old, path, lines = "", None, []
    todo = diff.splitlines()
    while todo:
        line = todo.pop(0)
        if line.startswith("--- "):
            old = line.removeprefix("--- ")
            new = todo.pop(0)
            assert new.startswith("+++ b/"), new
            path = root / new.removeprefix("+++ b/")
            assert path.resolve().is_relative_to(root.resolve()), path
            if old == "/dev/null":
                assert not path.exists(), f"{path} is there already"
                lines = []
            else:
                assert old == f"a/{path.relative_to(root)}", old
                lines = path.read_text(encoding="utf-8").splitlines()
            continue
        hunk = _HUNK.fullmatch(line)
        assert hunk and path is not None, f"neither a file nor a hunk: {line!r}"
        counts = [1 if count is None else int(count) for count in (hunk[2], hunk[4])]
        before, after = [], []
        while (len(before), len(after)) != tuple(counts):
            assert todo, f"{path}: a hunk is cut off"
            mark, body = todo[0][:1] or " ", todo.pop(0)[1:]
            assert mark in " +-", f"{path}: {mark + body!r} belongs to no hunk"
            before += [body] if mark in " -" else []
            after += [body] if mark in " +" else []
            assert len(before) <= counts[0] and len(after) <= counts[1], f"{path}: a hunk's counts are wrong"
        places = [at for at in range(len(lines) - len(before) + 1) if lines[at : at + len(before)] == before]
        assert len(places) == 1, f"{path}: the hunk's lines stand {len(places)} times in the file:\n" + "\n".join(
            before
        )
        lines[places[0] : places[0] + len(before)] = after
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def copy_of_package(folder: Path) -> Path:
    shutil.copytree(ROOT / "disaggkd_cli", folder / "disaggkd_cli", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_the_page_adds_five_things_each_with_diffs_and_lines_that_use_them():
    found = sections()
    assert list(found) == ["A divergence", "A wire format", "A data source", "A tracker", "A teacher engine"]
    for title, text in found.items():
        assert blocks(text, "diff") and len(blocks(text, "python")) == 1, title
        assert text.count("```") == 2 * (len(blocks(text, "diff")) + 1), f"{title}: a block that nobody tests"


@pytest.mark.parametrize("title", sections())
def test_each_sections_diffs_apply_by_themselves(title, tmp_path):
    copy_of_package(tmp_path)
    for diff in blocks(sections()[title], "diff"):
        apply_diff(diff, tmp_path)
    changed = [
        path.relative_to(tmp_path)
        for path in tmp_path.rglob("*.py")
        if not (ROOT / path.relative_to(tmp_path)).exists()
        or path.read_bytes() != (ROOT / path.relative_to(tmp_path)).read_bytes()
    ]
    assert len(changed) >= 2
    for path in changed:
        compile((tmp_path / path).read_text(), str(path), "exec")


@pytest.mark.parametrize("title", sections())
def test_its_lines_fail_without_the_diffs(title):
    (lines,) = blocks(sections()[title], "python")
    with pytest.raises((AssertionError, ValueError, UserError)):
        exec(compile(lines, title, "exec"), {"__name__": "page"})


def test_what_was_added_works(tmp_path):
    """All diffs in one copy, and all lines in one process: they do not get in each other's way."""
    copy_of_package(tmp_path)
    program = []
    for title, text in sections().items():
        for diff in blocks(text, "diff"):
            apply_diff(diff, tmp_path)
        (lines,) = blocks(text, "python")
        program.append(f"exec(compile({lines!r}, {title!r}, 'exec'), {{'__name__': 'page'}})\nprint({title!r})")
    here = "import disaggkd_cli\nassert disaggkd_cli.__file__.startswith(" + repr(str(tmp_path)) + ")"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([here, *program])],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == list(sections())


def test_the_applier_refuses_what_does_not_stand_there(tmp_path):
    (tmp_path / "file.py").write_text("one\ntwo\nthree\n")
    good = "--- a/file.py\n+++ b/file.py\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n"
    for bad in (
        good.replace(" three", " tree"), good.replace("-two", "-too"), good.replace("-1,3", "-1,2"),
        good.replace("a/file", "a/other"), good.replace("--- a/file.py", "--- /dev/null"),
        good.replace("b/file", "b/../x"), good + "rest\n",
    ):  # fmt: skip
        with pytest.raises((AssertionError, FileNotFoundError)):
            apply_diff(bad, tmp_path)
        (tmp_path / "file.py").write_text("one\ntwo\nthree\n")
    apply_diff(good, tmp_path)
    assert (tmp_path / "file.py").read_text() == "one\n2\nthree\n"
    (tmp_path / "file.py").write_text("one\ntwo\nthree\n" * 2)
    with pytest.raises(AssertionError, match="stand 2 times"):
        apply_diff(good, tmp_path)
