"""How a run shows how far it is: on narrow and wide terminals, in pipes, quiet and verbose."""

import io
import re

import pytest

from disaggkd_cli.terminal import console as literal_console
from disaggkd_cli.training.progress import RunProgress

FIGURES = {
    "loss": 2.5, "tokens_per_second": 1234.0, "stall_seconds": 0.5, "step_seconds": 2.0, "top1_agreement": 0.5,
}  # fmt: skip


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch):
    monkeypatch.setenv("DISAGGKD_VERBOSITY", "")
    monkeypatch.delenv("COLUMNS", raising=False)


def shown(width: int, terminal: bool = True, steps=(5,)) -> str:
    progress = RunProgress(30, visible=True)
    progress.console = literal_console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)
    progress.start(4)
    for step in steps:
        progress.step(step, FIGURES)
    progress.close()
    return progress.console.file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_how_far_it_is_stays_on_narrow_terminals(width):
    lines = [line for line in re.split(r"[\r\n]|\x1b\[[0-9?]*[a-zA-Z]", shown(width)) if "loss 2.5" in line]
    assert lines
    assert all("5/30" in line and len(line) <= width for line in lines)


def test_in_a_pipe_lines_come_now_and_then_and_all_of_them_when_verbose(monkeypatch):
    assert shown(200, False, (5, 6, 7)).count("step ") == 1
    monkeypatch.setenv("DISAGGKD_VERBOSITY", "verbose")
    assert shown(200, False, (5, 6, 7)).count("step ") == 3
    assert shown(200, True, (5, 6, 7)).count("step ") == 3


def test_when_quiet_only_warnings_are_said(monkeypatch):
    monkeypatch.setenv("DISAGGKD_VERBOSITY", "quiet")
    progress = RunProgress(30, visible=True)
    progress.console = literal_console(file=io.StringIO(), width=100)
    progress.start(0)
    progress.step(1, FIGURES)
    progress.log("after step 1: all is well")
    progress.log("warning: it is not")
    figures = {"eval_perplexity": 1.0, "eval_lm_loss": 1.0, "eval_kd": 1.0, "eval_top1_agreement": 1.0}
    progress.before_and_after(figures, figures)
    assert progress.console.file.getvalue() == "warning: it is not\n"
