"""What gpu_checks makes of steps that fail, hang, skip or cannot run: none of it may read as passed."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "gpu_checks.py"


@pytest.fixture(scope="module")
def gpu_checks():
    specification = importlib.util.spec_from_file_location("gpu_checks", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    sys.modules["gpu_checks"] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    yield module
    del sys.modules["gpu_checks"]


@pytest.fixture
def checks(gpu_checks, tmp_path):
    (tmp_path / "logs").mkdir()
    return gpu_checks.Checks(argparse.Namespace(device="cpu", small=True, budget=60, out=tmp_path))


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def well(output: str):
    return "passed", output.strip(), {}


def test_a_step_that_ends_well(checks, gpu_checks, capsys):
    step = checks.step("good", python("print('figures')"), 20, well)
    assert (step.status, step.summary) == ("passed", "figures")
    assert gpu_checks.report(checks) == 0
    assert json.loads((checks.out / "gpu_checks.json").read_text())["passed"] is True


@pytest.mark.parametrize(
    "code, limit, status, says",
    [
        ("import sys; print('why'); sys.exit(3)", 20, "FAILED", "exit code 3: why"),
        ("import time; print('begun', flush=True); time.sleep(60)", 2, "TIMED OUT", "stopped after 2 s; begun"),
        ("pass", 20, "FAILED", "its output cannot be read: ValueError"),
    ],
)
def test_a_step_that_goes_wrong_does_not_stop_the_others(checks, gpu_checks, code, limit, status, says):
    def read(output):
        raise ValueError("nothing there")

    bad = checks.step("bad", python(code), limit, read)
    assert bad.status == status
    assert bad.summary.startswith(says)
    assert checks.step("next", python("print(1)"), 20, well).status == "passed"
    assert checks.step("after bad", python("print(1)"), 20, well, ("bad",)).status == "NOT RUN"
    assert gpu_checks.report(checks) == 1


def test_a_missing_package_is_named_and_its_steps_are_not_run(checks, gpu_checks, monkeypatch, capsys):
    monkeypatch.setattr(gpu_checks, "NEEDED", ("torch", "no-such-package"))
    gpu_checks.check_packages(checks)
    assert "MISSING: no-such-package" in capsys.readouterr().out
    step = checks.step("needs it", python("print(1)"), 20, well, ("no-such-package",))
    assert (step.status, step.summary) == ("NOT RUN", "no no-such-package here")
    assert gpu_checks.report(checks) == 1


def test_when_the_time_is_used_up_the_rest_is_not_run(checks, gpu_checks):
    checks.deadline = 0
    assert checks.step("late", python("print(1)"), 20, well).status == "NOT RUN"
    assert gpu_checks.report(checks) == 1


def test_skipped_tests_do_not_read_as_passed(checks, gpu_checks, monkeypatch):
    written = '<testsuites><testsuite tests="3" failures="0" errors="0" skipped="{}">{}</testsuite></testsuites>'
    one = '<testcase name="t"><skipped message="no CUDA device here"/></testcase>'
    for skipped, status in ((0, "passed"), (1, "NOT RUN"), (3, "NOT RUN")):
        text = written.format(skipped, one * skipped)
        code = f"open({str(checks.out / 'gpu_tests.xml')!r}, 'w').write({text!r})"
        monkeypatch.setattr(checks, "_run", lambda name, command, limit, code=code: (exec(code), (0, ""))[1])
        gpu_checks.check_tests(checks)
        assert checks.steps[-1].status == status
    assert "2 of 3 tests passed, 1 skipped: no CUDA device here" in checks.steps[1].summary


def test_the_next_smaller_head_is_tried_where_memory_lacks(checks, gpu_checks, monkeypatch):
    row = {"implementation": "fused", "seconds": 0.1, "scratch_bytes": 2**30, "gradient_error": 2e-3}
    result = {"rows": [row], "absent": [], "options": {"vocabulary": 7, "rows": 5}}
    answers = iter([(1, "torch.OutOfMemoryError: CUDA out of memory."), (0, "a warning\n" + json.dumps(result))])
    monkeypatch.setattr(checks, "_run", lambda *_: next(answers))
    checks.options.small = False
    gpu_checks.check_loss(checks)
    assert [step.status for step in checks.steps] == ["too big", "passed"]
    assert gpu_checks.report(checks) == 0
