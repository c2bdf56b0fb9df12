"""Names, paths, records and logs that would steer a terminal or write a page come out as plain text."""

import ast
import io
import json
import logging
import re
import shutil
from pathlib import Path

import pytest
from rich.table import Table

from disaggkd_cli import cli, runtime
from disaggkd_cli.checks.report import print_results, print_samples
from disaggkd_cli.checks.result import FAIL, CheckResult
from disaggkd_cli.config import load
from disaggkd_cli.config.check import check
from disaggkd_cli.data import look_at_texts
from disaggkd_cli.launch import Place
from disaggkd_cli.planner.command import PlanOptions, plan_command
from disaggkd_cli.report.read import read_runs
from disaggkd_cli.report.render import render
from disaggkd_cli.terminal import console, write
from disaggkd_cli.training.model_card import model_card
from disaggkd_cli.training.progress import RunProgress
from disaggkd_cli.training.run_directory import RunDirectory
from tests.support.runs import TINY_TEACHER, write_config
from tests.unit.report.test_report import Balanced, written_run

HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m<script>alert(1)</script>\"'&[bold]x[/bold]:smile:\u202e\u2028\r|`"
NAME = HOSTILE.replace("/", "\\")
"""As a part of a path."""
PACKAGE = Path(cli.__file__).parent
RAW = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def assert_tame(text, markup=True):
    assert not RAW.search(text), RAW.search(text)
    assert "owned" in text and (not markup or "[bold]x[" in text), text


def assert_page(text):
    assert_tame(text)
    assert "<script" not in text and not Balanced(text).open


@pytest.fixture
def out():
    return console(file=io.StringIO(), width=400, force_terminal=False)


def test_only_one_module_prints():
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())) if path.name != "terminal.py" else ():
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                assert name not in ("print", "Console", "sys.stdout.write", "sys.stderr.write", "typer.echo"), (
                    f"{path}, line {node.lineno}: use disaggkd_cli.terminal"
                )


def test_lines(capsys):
    write(HOSTILE)
    write(f"two\n{HOSTILE}", end="")
    assert_tame(capsys.readouterr().out)


@pytest.mark.parametrize("colour", [None, "standard"])
def test_consoles(colour):
    out = console(file=io.StringIO(), width=400, force_terminal=bool(colour), color_system=colour)
    table = Table(title=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(HOSTILE)
    out.print(HOSTILE, table, style="bold")
    text = out.file.getvalue()
    assert_tame(re.sub(r"\x1b\[[\d;]*m", "", text))
    assert ("\x1b[1" in text) == bool(colour)


def test_logs(tmp_path):
    directory = RunDirectory(tmp_path)
    runtime.open_log(Place("student"), directory)
    try:
        runtime.logger.info("joined: %s", HOSTILE)
        try:
            raise ValueError(HOSTILE)
        except ValueError:
            runtime.logger.exception("ends")
    finally:
        logging.getLogger("disaggkd").handlers.clear()
    text = (directory.logs / "student_0.log").read_text()
    assert_tame(text)
    assert "Traceback" in text and "\nValueError" in text


def test_progress(capsys):
    progress = RunProgress(3, visible=True)
    progress.log(HOSTILE)
    progress.close()
    assert_tame(capsys.readouterr().err)


def test_errors(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["disaggkd", "run", HOSTILE + ".yaml"])
    with pytest.raises(SystemExit):
        cli.main()
    assert_tame(capsys.readouterr().err)


def test_checks(out):
    print_results([CheckResult(FAIL, HOSTILE, HOSTILE, {}, HOSTILE)], out)
    print_samples([{"sequence": 1, "segments": [(HOSTILE, False), (HOSTILE, True)]}], out)
    assert_tame(out.file.getvalue())


def test_texts_of_a_dry_run(tmp_path, capsys):
    file = tmp_path / f"{NAME}.jsonl"
    file.write_text(json.dumps({"text": "a b c " * 50}) + "\n")
    config = load(str(write_config(tmp_path / "run.yaml", data__train=str(file), data__eval=0.5)), [])
    write("\n".join(look_at_texts(config.data)))
    assert_tame(capsys.readouterr().out)


@pytest.fixture
def hostile_model(tmp_path):
    directory = tmp_path / NAME
    directory.mkdir()
    shutil.copy(TINY_TEACHER / "config.json", directory)
    return directory


def test_plan_and_its_page(tmp_path, hostile_model, out):
    file = write_config(tmp_path / "run.yaml", teacher__model=str(hostile_model))
    plan_command(load(str(file), []), PlanOptions(html=str(tmp_path / "page.html")), out)
    assert_tame(out.file.getvalue())
    assert_page((tmp_path / "page.html").read_text())


def test_report(tmp_path):
    run = written_run(tmp_path / NAME, 20, student__freeze=[HOSTILE], run_dir=HOSTILE)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        line["teachers"] = {HOSTILE: {**line["teachers"]["teacher 0 #0"], "blocked": HOSTILE, "backend": HOSTILE}}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    status = json.loads((run / "status.json").read_text()) | {"reason": HOSTILE, "changed": [HOSTILE]}
    (run / "status.json").write_text(json.dumps(status))
    (run / "environment.json").write_text(json.dumps({"platform": HOSTILE, "device": HOSTILE, "started": HOSTILE}))
    (run / "samples.jsonl").write_text(
        json.dumps({"step": 8, "prompt": HOSTILE, "teacher": HOSTILE, "student": HOSTILE}) + "\n"
    )
    (run / "logs" / "student_0.log").write_text(f"2026-12-01 10:00:00,000 [student 0] {HOSTILE} joined; 1 linked\n")
    other = written_run(tmp_path / "other", 20)
    for runs in ([run], [run, other]):
        assert_page(render(read_runs([str(one) for one in runs])))


def test_model_card(tmp_path, hostile_model):
    config = load(str(write_config(tmp_path / "run.yaml", teacher__model=str(hostile_model), run_dir=NAME)), [])
    config.data.columns = {"prompt": "```\n```\n<script>"}
    card = model_card(config, "every_2", [], 20, "torch")
    text = card.partition("```yaml")[0]
    assert_tame(text, markup=False)
    assert "<script" not in text.replace("\\<script", "")
    assert "\\[bold\\]x" in text
    fences = [line for line in card.splitlines() if line.startswith("```")]
    assert len(fences) == 4 and fences[3].count("`") > 3, "the config cannot close its own fence"


def test_configs_problems(tmp_path):
    config = load(str(write_config(tmp_path / "run.yaml")), [])
    config.loss.divergence = HOSTILE
    buffer = io.StringIO()
    write("\n".join(check(config)), buffer)
    assert_tame(buffer.getvalue())
