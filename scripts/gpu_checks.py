"""The steps of scripts/gpu_checks.sh. Standard library only; every step is a process of its own with a time limit.

A step passes, fails, runs out of time, or is `not run` with the reason; nothing that did not run reads as passed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("torch", "transformers", "numpy", "omegaconf", "psutil", "rich", "safetensors", "typer")
FOR_TESTS = ("pytest",)
HELPFUL = ("datasets", "triton", "flash-linear-attention", "causal-conv1d", "liger-kernel", "trl", "pytest-timeout")
PASSED, FAILED, TIMED_OUT, NOT_RUN = "passed", "FAILED", "TIMED OUT", "NOT RUN"
TOO_BIG = "too big"
"""For this GPU; the next smaller size is tried, and counts instead."""
LOSS_TOLERANCE = 1e-2
"""Largest relative difference of a step's loss between the two modes: bf16 kernels need not add in the same order."""


@dataclass
class Step:
    """One line of the table."""

    name: str
    status: str = NOT_RUN
    seconds: float = 0.0
    summary: str = ""
    figures: dict = field(default_factory=dict)


class Checks:
    """Runs steps one after another and keeps what came of them."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.gpu = options.device == "cuda"
        self.out: Path = options.out
        self.work = Path(tempfile.mkdtemp(prefix="gpu-checks-"))
        self.deadline = time.monotonic() + options.budget
        self.steps: list[Step] = []
        self.missing: dict[str, list[str]] = {}
        self.machine: dict = {}

    def step(self, name: str, command: list[str], limit: float, read: Callable[[str], tuple[str, str, dict]],
             needs: tuple[str, ...] = ()) -> Step:  # fmt: skip
        """Run `command`; `read` makes (status, summary, figures) of its output when it ends well.

        Args:
            needs: names of packages and of earlier steps.
        """
        step = Step(name)
        self.steps.append(step)
        lacking = [need for need in needs if need in self.missing.get("needed", [])]
        broken = [other.name for other in self.steps if other.name in needs and other.status != PASSED]
        left = self.deadline - time.monotonic()
        if lacking or broken or left < 5:
            reason = f"no {', '.join(lacking)} here" if lacking else f"{', '.join(broken)} did not pass"
            step.summary = reason if lacking or broken else f"the {self.options.budget:g} s are used up"
            print(f"  {step.status:9} {name}: {step.summary}", flush=True)
            return step
        began = time.monotonic()
        code, output = self._run(name, command, min(limit, left))
        step.seconds = time.monotonic() - began
        try:
            if code == 0:
                step.status, step.summary, step.figures = read(output)
            elif code is None:
                step.status, step.summary = TIMED_OUT, f"stopped after {min(limit, left):.0f} s; {_last_line(output)}"
            else:
                step.status, step.summary = FAILED, f"exit code {code}: {_last_line(output)}"
        except (ValueError, KeyError, IndexError, OSError, ElementTree.ParseError) as error:
            step.status, step.summary = FAILED, f"its output cannot be read: {type(error).__name__}: {error}"
        print(f"  {step.status:9} {name} ({step.seconds:.0f} s): {step.summary}", flush=True)
        return step

    def _run(self, name: str, command: list[str], limit: float) -> tuple[int | None, str]:
        variables = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "COLUMNS": "160"}
        if not self.gpu:
            variables |= {"DISAGGKD_REHEARSE_GPU": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        log = self.out / "logs" / f"{name.replace(' ', '_')}.log"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, stdout=stream,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        return code, log.read_text(errors="replace")


def _last_line(output: str) -> str:
    lines = [line for line in output.strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"


def _json_of(output: str) -> dict:
    """The JSON object that a command printed after its other lines."""
    for start in [0, *(index + 1 for index, character in enumerate(output) if character == "\n")]:
        if output[start : start + 1] == "{":
            try:
                return json.JSONDecoder().raw_decode(output, start)[0]
            except ValueError:
                continue
    raise ValueError("it printed no JSON")


def check_packages(checks: Checks) -> None:
    """Say which packages are here, and which steps cannot run for want of one."""
    versions = {}
    for name in (*NEEDED, *FOR_TESTS, *HELPFUL):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    checks.missing["needed"] = [name for name in (*NEEDED, *FOR_TESTS) if versions[name] is None]
    checks.machine["packages"] = versions
    print("packages: " + ", ".join(f"{name} {version or 'MISSING'}" for name, version in versions.items()))
    if checks.missing["needed"]:
        print(f"MISSING: {', '.join(checks.missing['needed'])}; steps that need one of them are not run. "
              f"Install: {sys.executable} -m pip install {' '.join(checks.missing['needed'])}")  # fmt: skip


def check_machine(checks: Checks) -> None:
    """Step: the GPU and what the loss finds out about it."""

    def read(output: str) -> tuple[str, str, dict]:
        found = _json_of(output)
        checks.machine |= found
        what = f"{found['gpus'][0]}, {found['memory_gib']} GiB, CUDA {found['cuda']}" if found["gpus"] else "CPU"
        return PASSED, f"{what}; torch {found['torch']}", found

    checks.step("machine", [sys.executable, "scripts/gpu_machine.py", checks.options.device], 90, read, ("torch",))


def check_tests(checks: Checks) -> None:
    """Step: tests/gpu. Skipped tests do not count as passed."""
    results = checks.out / "gpu_tests.xml"

    def read(output: str) -> tuple[str, str, dict]:
        suite = ElementTree.parse(results).getroot().find("testsuite")
        figures = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
        ran = figures["tests"] - figures["skipped"]
        reasons = sorted({one.get("message", "") for one in suite.iter("skipped")})
        summary = f"{ran} of {figures['tests']} tests passed"
        if figures["skipped"]:
            return NOT_RUN, f"{summary}, {figures['skipped']} skipped: {'; '.join(reasons)}", figures
        return (PASSED if ran else NOT_RUN), summary, figures

    results.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-q", "-o", "addopts=", "-p",
               "no:cacheprovider", f"--junitxml={results}"]  # fmt: skip
    checks.step("gpu tests", command, 180, read, ("torch", "transformers", "pytest"))


def check_loss(checks: Checks) -> None:
    """Step: `bench loss` on the reference head, or on the next smaller shape that the memory holds."""
    shapes = [["--head", "reference", "--repeats", "3"],
              ["--head", "reference", "--rows", "4096", "--vocabulary", "151936", "--repeats", "3"],
              ["--head", "reference", "--rows", "4096", "--vocabulary", "65536", "--student-width", "2048", "--budget",
               "1GiB", "--repeats", "3"]]  # fmt: skip
    if checks.options.small:
        shapes = [["--head", "reference", "--rows", "64", "--vocabulary", "2048", "--student-width", "64",
                   "--teacher-width", "32", "--budget", "16MiB", "--repeats", "1", "--no-peers"]]  # fmt: skip

    def read(output: str) -> tuple[str, str, dict]:
        result = _json_of(output)
        seconds = {}
        for row in result["rows"]:
            seconds.setdefault(row["implementation"], row["seconds"])
        fused = [row for row in result["rows"] if row["implementation"] == "fused"]
        parts = [f"V={result['options']['vocabulary']}, {result['options']['rows']} rows"]
        parts += [f"{name} {1e3 * value:.1f} ms" for name, value in seconds.items()]
        parts += [f"scratch {fused[0]['scratch_bytes'] / 2**30:.2f} GiB, error {fused[0]['gradient_error']:.1e}"]
        parts += [f"not run: {one['implementation']} ({one['reason'][:60]})" for one in result["absent"]]
        good = fused[0]["gradient_error"] < 1e-2
        return (PASSED if good else FAILED), "; ".join(parts), result

    for number, shape in enumerate(shapes):
        name = "bench loss" if not number else f"bench loss, smaller {number}"
        command = [sys.executable, "-m", "disaggkd_cli", "bench", "loss", "--device", checks.options.device, "--json"]
        step = checks.step(name, [*command, *shape], 150, read, ("torch", "typer", "omegaconf"))
        if step.status != FAILED or "out of memory" not in step.summary.lower():
            return
        if number + 1 < len(shapes):
            step.status = TOO_BIG


def check_link(checks: Checks) -> None:
    """Step: `bench link`, over loopback."""
    sizes = ["--payload", "64KiB"] if checks.options.small else ["--payload", "1MiB", "--payload", "32MiB"]

    def read(output: str) -> tuple[str, str, dict]:
        report = _json_of(output)
        rows = [f"{row['payload_bytes'] / 2**20:g} MiB: {row['bytes_per_second'] / 1e9:.2f} GB/s (raw gloo "
                f"{row['raw_bytes_per_second'] / 1e9:.2f})" for row in report["rows"]]  # fmt: skip
        return PASSED, "; ".join(rows), report

    command = [sys.executable, "-m", "disaggkd_cli", "bench", "link", "--json", "--links", "1", "--rounds", "3", *sizes]
    checks.step("bench link", command, 90, read, ("torch", "typer", "omegaconf"))


def check_pair(checks: Checks) -> None:
    """Step: make the random pair."""
    output, device = checks.work / "pair", checks.options.device
    command = [sys.executable, "scripts/make_random_pair.py", str(output), "--device", device]

    def read(output: str) -> tuple[str, str, dict]:
        lines = [line.rpartition("/")[2] for line in output.splitlines() if "parameters in" in line]
        return (PASSED if len(lines) == 2 else FAILED), "; ".join(lines), {}

    command += ["--small"] if checks.options.small else []
    checks.step("random pair", command, 120, read, ("torch", "transformers", "safetensors"))


def write_config(checks: Checks) -> Path:
    """Write the config of the runs (JSON is YAML) and return its path."""
    pair, small = checks.work / "pair", checks.options.small
    config = {
        "run_dir": str(checks.work / "run"),
        "teacher": {"model": str(pair / "teacher"), "dtype": "bfloat16" if checks.gpu else "float32"},
        "student": {"model": str(pair / "student"), "dtype": "bfloat16" if checks.gpu else "float32"},
        "loss": {"memory_budget": "16MiB" if small else "1GiB"},
        "data": {"train": "builtin:pydoc", "sequence_length": 32 if small else 512, "eval_sequences": 4},
        "train": {"steps": 4 if small else 20, "micro_batch_sequences": 2 if small else 8, "warmup_steps": 2,
                  "learning_rate": 1.0e-4, "eval_every": 0, "save_every": 0},
        # The payload is what the teacher computed, so that losses can be compared.
        "transport": {"dtype": "bfloat16" if checks.gpu else "float32", "timeout": 60, "teacher_wait": 150},
        "launch": {"device": checks.options.device},
    }  # fmt: skip
    path = checks.out / "run.yaml"
    path.write_text(json.dumps(config, indent=2))
    return path


def check_run(checks: Checks, mode: str, config: Path) -> None:
    """Step: a whole run of the pair."""
    run_dir = checks.work / f"run-{mode}"

    def read(output: str) -> tuple[str, str, dict]:
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if "loss" in line]
        later = steps[len(steps) // 2 :]
        speed = sum(line["tokens_per_second"] for line in later) / len(later)
        stall = sum(line["stall_seconds"] for line in later)
        figures = {"losses": [line["loss"] for line in steps], "tokens_per_second": speed, "stall_seconds": stall,
                   "peak_memory_bytes": max(line["peak_memory_bytes"] for line in steps), "steps": steps}  # fmt: skip
        placed = json.loads((run_dir / "environment.json").read_text())["placement"]["device"]
        right = placed.startswith(checks.options.device)
        summary = f"{len(steps)} steps on {placed}, loss {steps[0]['loss']:.4f} to {steps[-1]['loss']:.4f}, "
        summary += f"{speed:,.0f} tokens/s, peak {figures['peak_memory_bytes'] / 2**30:.2f} GiB, stall {stall:.2f} s"
        return (PASSED if right else FAILED), summary, figures

    command = [sys.executable, "-m", "disaggkd_cli", "run", str(config), f"mode={mode}", f"run_dir={run_dir}",
               "--restarts", "0"]  # fmt: skip
    checks.step(f"{mode} run", command, 170, read, (*NEEDED, "random pair"))
    if (run_dir / "logs").is_dir():
        shutil.copytree(run_dir / "logs", checks.out / "logs" / f"{mode}_run", dirs_exist_ok=True)


def compare_runs(checks: Checks) -> None:
    """Step: both modes' losses, step by step."""
    step = Step("same losses")
    checks.steps.append(step)
    found = {one.name: one.figures["losses"] for one in checks.steps if "losses" in one.figures}
    if len(found) < 2:
        step.summary = "needs both runs"
        return
    pairs = list(zip(found["disaggregated run"], found["colocated run"], strict=False))
    worst = max(abs(one - other) / max(abs(other), 1e-12) for one, other in pairs)
    step.status = PASSED if worst <= LOSS_TOLERANCE else FAILED
    step.summary = f"{len(pairs)} steps, largest relative difference {worst:.1e} (allowed {LOSS_TOLERANCE:g})"
    step.figures = {"largest_relative_difference": worst}
    print(f"  {step.status:9} {step.name}: {step.summary}")


def check_config(checks: Checks, config: Path) -> None:
    """Step: `disaggkd check` on the pair."""

    def read(output: str) -> tuple[str, str, dict]:
        return PASSED, _last_line(output), {}

    command = [sys.executable, "-m", "disaggkd_cli", "check", str(config)]
    checks.step("disaggkd check", command, 120, read, (*NEEDED, "random pair"))


def report(checks: Checks) -> int:
    """Print the table, write the JSON file, and return the exit code."""
    width = max(len(step.name) for step in checks.steps)
    title = "disaggkd on a GPU" if checks.gpu else "disaggkd, the GPU checks rehearsed on a CPU"
    print(f"\n{title}\n")
    for step in checks.steps:
        print(f"{step.name:{width}}  {step.status:9}  {step.seconds:5.0f} s  {step.summary}")
    good = all(step.status in (PASSED, TOO_BIG) for step in checks.steps)
    content = {
        "device": checks.options.device,
        "small": checks.options.small,
        "passed": good,
        "machine": checks.machine,
        "steps": [asdict(step) for step in checks.steps],
    }
    path = checks.out / "gpu_checks.json"
    path.write_text(json.dumps(content, indent=2) + "\n")
    print(f"\n{'all passed' if good else 'NOT all passed'}; {path}; logs in {checks.out / 'logs'}")
    return 0 if good else 1


def main() -> int:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    parser.add_argument("--budget", type=float, default=570, help="seconds for everything (570)")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "gpu_checks"))
    options = parser.parse_args()
    options.out = options.out.resolve()
    (options.out / "logs").mkdir(parents=True, exist_ok=True)
    checks = Checks(options)
    check_packages(checks)
    check_machine(checks)
    if checks.steps[0].status == PASSED:
        check_tests(checks)
        check_pair(checks)
        config = write_config(checks)
        check_run(checks, "disaggregated", config)
        check_run(checks, "colocated", config)
        compare_runs(checks)
        check_loss(checks)
        check_link(checks)
        check_config(checks, config)
    shutil.rmtree(checks.work, ignore_errors=True)  # models and checkpoints, gigabytes of them
    return report(checks)


if __name__ == "__main__":
    sys.exit(main())
