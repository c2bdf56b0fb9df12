"""What gpu_checks makes of steps that fail, hang, skip or cannot run: none of it may read as passed."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
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
        monkeypatch.setattr(checks, "_run", lambda *_, code=code: (exec(code), (0, ""))[1])
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


def test_what_would_run_is_printed_and_nothing_is_started(checks, gpu_checks, capsys, monkeypatch):
    monkeypatch.setattr(checks, "_run", lambda *_: pytest.fail("a step was started"))
    checks.show, checks.gpu = True, True
    checks.options.small, checks.options.soak_steps = False, 3000
    figures = {"peak_bytes": 3 * 2**30, "tokens_per_second": 1234.0}
    planned = dict.fromkeys(("disaggregated", "colocated", "sharded", "hsdp"), figures)
    checks.expected = {"loss": {"fused": 0.097, "floor": 0.074}, **planned}
    config = gpu_checks.write_config(checks)
    gpu_checks.one_gpu(checks, config)
    gpu_checks.two_gpus(checks, config, ())
    gpu_checks.eight_gpus(checks, config, ())
    printed = capsys.readouterr().out
    order = ["gpu models", "gpu loss", "gpu payloads", "gpu runs", "disaggregated run", "same losses", "bench loss",
             "nccl run", "killed peer run", "outlived watchdog run", "sharded run", "hsdp run", "soak run",
             "memory of the soak"]  # fmt: skip
    names = [step.name for step in checks.steps]
    assert [name for name in names if name in order] == order
    assert {step.status for step in checks.steps} == {"would run"}
    assert all(step.claim and step.expected for step in checks.steps if step.name != "random pair")
    assert "by the cost model 97 ms at 4 GiB of scratch, the products alone 74 ms" in printed
    assert "expected: peak 3.00 GiB (within 15% on a GPU), 1,234 tokens/s" in printed
    assert "DISAGGKD_FAULT=teacher 0.payload:kill@9,teacher 0.forward:sleep:30" in printed
    assert "student.replicate=2" in printed and "with 16 links" in printed


def test_a_measured_figure_stands_beside_the_expected_one_with_a_verdict(checks, gpu_checks, capsys):
    checks.step("good", python("print('3.1 GiB')"), 20, well, claim="memory is as planned", expected="3.0 GiB")
    checks.step("bad", python("raise SystemExit(1)"), 20, well, claim="links form", expected="they form")
    checks.step("after", python("print(1)"), 20, well, ("bad",), claim="runs end")
    gpu_checks.report(checks)
    printed = capsys.readouterr().out
    assert "3.1 GiB\n" in printed and "expected: 3.0 GiB\n" in printed
    for line in ("holds           memory is as planned (good)", "DOES NOT HOLD   links form (bad)",
                 "not shown       runs end (after)"):  # fmt: skip
        assert line in printed, printed
    written = json.loads((checks.out / "gpu_checks.json").read_text())["steps"]
    assert [(step["verdict"], step["expected"]) for step in written] == [
        ("holds", "3.0 GiB"), ("DOES NOT HOLD", "they form"), ("not shown", ""),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("peaks", "gpu", "faults", "output", "status"),
    [
        ([100, 104], True, "", "", "passed"), ([100, 116], True, "", "", "FAILED"), ([80, 84], True, "", "", "FAILED"),
        ([9, 9], False, "", "", "passed"), ([9, 9], True, "a", "was killed by SIGKILL", "passed"),
        ([9, 9], True, "a", "nothing happened", "FAILED"),
    ],
)  # fmt: skip
def test_a_run_is_judged_by_its_plan_and_by_what_it_survived(
    checks, gpu_checks, peaks, gpu, faults, output, status, monkeypatch
):
    run = checks.work / "run-sharded"
    run.mkdir()
    lines = [{"loss": 1.0, "tokens_per_second": 5, "stall_seconds": 0, "peak_memory_bytes": peak} for peak in peaks]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (run / "environment.json").write_text('{"placement": {"device": "cpu"}}')
    checks.gpu, checks.expected = gpu, {"sharded": {"peak_bytes": 100, "tokens_per_second": 5}}
    monkeypatch.setattr(checks, "_run", lambda *_: (0, output))
    step = gpu_checks.check_run(checks, "sharded", checks.out, (), claim="it runs", faults=faults)
    assert step.status == status, step.summary


@pytest.mark.parametrize(
    ("losses", "status"),
    [([1.0, 2.0], "passed"), ([1.0, 2.1], "FAILED"), ([1.0], "FAILED"), (None, "NOT RUN")],
)
def test_losses_of_two_runs_are_compared_whole(checks, gpu_checks, losses, status):
    for name, figures in (("one run", {"losses": [1.0, 2.0]}), ("other run", {"losses": losses} if losses else {})):
        checks.steps.append(sys.modules["gpu_checks_engine"].Step(name, figures=figures))
    gpu_checks.compare_runs(checks, "same", "one", "other")
    assert checks.steps[-1].status == status


def test_what_a_step_started_ends_with_the_checks(checks, tmp_path, monkeypatch):
    started, wait = tmp_path / "started", subprocess.Popen.wait

    def stopped(process, *arguments, **options):
        monkeypatch.setattr(subprocess.Popen, "wait", wait)
        while not (started.exists() and started.read_text()):
            time.sleep(0.02)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", stopped)
    code = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    with pytest.raises(KeyboardInterrupt):
        checks.step("endless", python(code), 20, well)
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


@pytest.mark.parametrize(
    ("torch_name", "name"),
    [
        ("NVIDIA H200", "H200-SXM"), ("NVIDIA H100 80GB HBM3", "H100-SXM"), ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100-80-SXM"), ("NVIDIA A100-SXM4-40GB", "A100-40-SXM"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"), ("NVIDIA GH200 480GB", "GH200-96"), ("Tesla T4", "H100-SXM"),
    ],
)  # fmt: skip
def test_the_catalogue_knows_what_torch_calls_a_gpu(torch_name, name):
    specification = importlib.util.spec_from_file_location("gpu_expected", SCRIPT.with_name("gpu_expected.py"))
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    assert module.catalogue_name(torch_name) == name
    assert 1 <= module.loss_seconds(torch_name)["fused"] / module.loss_seconds(torch_name)["floor"] <= 1.4
