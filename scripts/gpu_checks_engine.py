"""What gpu_checks does with its steps: runs each as a process with a time limit, sets expected beside measured.

A step passes, fails, runs out of time, or is `not run` with the reason; nothing that did not run reads as passed.
Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PASSED, FAILED, TIMED_OUT, NOT_RUN, WOULD_RUN = "passed", "FAILED", "TIMED OUT", "NOT RUN", "would run"
TOO_BIG = "too big"
"""For this GPU; the next smaller size is tried, and counts instead."""
VERDICTS = {PASSED: "holds", TOO_BIG: "holds", FAILED: "DOES NOT HOLD", TIMED_OUT: "not shown", NOT_RUN: "not shown",
            WOULD_RUN: "not shown"}  # fmt: skip


@dataclass
class Step:
    """One line of the table."""

    name: str
    status: str = NOT_RUN
    seconds: float = 0.0
    summary: str = ""
    figures: dict = field(default_factory=dict)
    claim: str = ""
    """What passing shows."""
    expected: str = ""
    """The figure that was predicted, beside which the measured one stands in `summary`."""
    command: str = ""

    @property
    def verdict(self) -> str:
        """Whether the claim holds."""
        return VERDICTS[self.status]


class Checks:
    """Runs steps one after another and keeps what came of them."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.gpu = options.device == "cuda"
        self.show = getattr(options, "what_would_run", False)
        self.out: Path = options.out
        self.work = Path(tempfile.mkdtemp(prefix="gpu-checks-"))
        self.deadline = time.monotonic() + options.budget
        self.steps: list[Step] = []
        self.missing: dict[str, list[str]] = {}
        self.machine: dict = {}
        self.expected: dict = {}

    def step(self, name: str, command: list[str], limit: float, read: Callable[[str], tuple[str, str, dict]],
             needs: tuple[str, ...] = (), *, claim: str = "", expected: str = "",
             variables: dict | None = None) -> Step:  # fmt: skip
        """Run `command`; `read` makes (status, summary, figures) of its output when it ends well.

        Args:
            limit: seconds.
            needs: names of packages and of earlier steps.
            claim: what passing shows.
            expected: the predicted figure.
            variables: of the environment.
        """
        spelled = [*(f"{key}={value}" for key, value in (variables or {}).items()), *map(shlex.quote, command)]
        step = Step(name, claim=claim, expected=expected, command=" ".join(spelled))
        self.steps.append(step)
        if self.show:
            step.status = WOULD_RUN
            print(f"{len(self.steps):2}. {name}, at most {limit:.0f} s: {claim}")
            print(f"    expected: {expected or 'it ends well'}\n    {step.command}", flush=True)
            return step
        lacking = [need for need in needs if need in self.missing.get("needed", [])]
        broken = [other.name for other in self.steps if other.name in needs and other.status != PASSED]
        left = self.deadline - time.monotonic()
        if lacking or broken or left < 5:
            reason = f"no {', '.join(lacking)} here" if lacking else f"{', '.join(broken)} did not pass"
            step.summary = reason if lacking or broken else f"the {self.options.budget:g} s are used up"
            print(f"  {step.status:9} {name}: {step.summary}", flush=True)
            return step
        began = time.monotonic()
        code, output = self._run(name, command, min(limit, left), variables or {})
        step.seconds = time.monotonic() - began
        try:
            if code == 0:
                step.status, step.summary, step.figures = read(output)
            elif code is None:
                step.status, step.summary = TIMED_OUT, f"stopped after {min(limit, left):.0f} s; {last_line(output)}"
            else:
                step.status, step.summary = FAILED, f"exit code {code}: {last_line(output)}"
        except (ValueError, KeyError, IndexError, OSError, ElementTree.ParseError) as error:
            step.status, step.summary = FAILED, f"its output cannot be read: {type(error).__name__}: {error}"
        print(f"  {step.status:9} {name} ({step.seconds:.0f} s): {step.summary}", flush=True)
        return step

    def _run(self, name: str, command: list[str], limit: float, own: dict) -> tuple[int | None, str]:
        variables = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "COLUMNS": "160"}
        if not self.gpu:
            variables |= {"DISAGGKD_REHEARSE_GPU": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        log = self.out / "logs" / f"{name.replace(' ', '_')}.log"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **variables, **own}, stdin=subprocess.DEVNULL, stdout=stream,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
                _end(process)
            except BaseException:  # told to stop: what was started goes too
                _end(process)
                raise
        return code, log.read_text(errors="replace")


def _end(process: subprocess.Popen) -> None:
    """End a step's process and all that it started."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def last_line(output: str) -> str:
    lines = [line for line in output.strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"


def json_of(output: str) -> dict:
    """The JSON object that a command printed after its other lines."""
    for start in [0, *(index + 1 for index, character in enumerate(output) if character == "\n")]:
        if output[start : start + 1] == "{":
            try:
                return json.JSONDecoder().raw_decode(output, start)[0]
            except ValueError:
                continue
    raise ValueError("it printed no JSON")


def report(checks: Checks) -> int:
    """Print the table, write the JSON file, and return the exit code."""
    width = max(len(step.name) for step in checks.steps)
    title = "disaggkd on a GPU" if checks.gpu else "disaggkd, the GPU checks rehearsed on a CPU"
    print(f"\n{title}\n")
    for step in checks.steps:
        print(f"{step.name:{width}}  {step.status:9}  {step.seconds:5.0f} s  {step.summary}")
        if step.expected:
            print(f"{'':{width}}  expected: {step.expected}")
    print("\nClaims\n")
    for step in checks.steps:
        if step.claim:
            print(f"{step.verdict:14}  {step.claim} ({step.name})")
    good = all(step.status in (PASSED, TOO_BIG) for step in checks.steps)
    content = {
        "device": checks.options.device,
        "small": checks.options.small,
        "passed": good,
        "machine": checks.machine,
        "steps": [{**asdict(step), "verdict": step.verdict} for step in checks.steps],
    }
    path = checks.out / "gpu_checks.json"
    path.write_text(json.dumps(content, indent=2) + "\n")
    print(f"\n{'all passed' if good else 'NOT all passed'}; {path}; logs in {checks.out / 'logs'}")
    return 0 if good else 1
