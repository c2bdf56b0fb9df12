"""Whole runs as steps of gpu_checks: on one GPU, on two over NCCL with a peer killed, on eight for long."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from gpu_checks_engine import FAILED, NOT_RUN, PASSED, WOULD_RUN, Checks, Step

LOSS_TOLERANCE = 1e-2
"""Largest relative difference of a step's loss between two runs: bf16 kernels need not add in the same order."""
MEMORY_BAND = 0.15
"""How far measured memory of a rank may be from the planned one: shapes as small as these have no finer band."""
GROWTH = 0.01
"""Of memory between the first half of a soak and the second."""
Needs = tuple[str, ...]


def check_run(checks: Checks, name: str, config: Path, needs: Needs, overrides: tuple[str, ...] = (), *, claim: str,
              faults: str = "", limit: float = 170, planned: str | None = None) -> Step:  # fmt: skip
    """Step: a whole run of the pair.

    Args:
        name: `disaggregated` and `colocated` are modes; others run disaggregated.
        overrides: of the config.
        faults: as `DISAGGKD_FAULT` spells them; each must happen, and the run end well for all that.
        planned: the case of `gpu_expected.CASES` to set beside it.
    """
    run_dir = checks.work / f"run-{name.replace(' ', '-')}"
    expected = checks.expected.get(planned or name, {})

    def read(output: str) -> tuple[str, str, dict]:
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if "loss" in line]
        later = steps[len(steps) // 2 :]
        speed = sum(line["tokens_per_second"] for line in later) / len(later)
        stall = sum(line["stall_seconds"] for line in later)
        peaks = [line["peak_memory_bytes"] for line in steps]
        figures = {"losses": [line["loss"] for line in steps], "tokens_per_second": speed, "stall_seconds": stall,
                   "peak_memory_bytes": max(peaks), "peaks": peaks}  # fmt: skip
        placed = json.loads((run_dir / "environment.json").read_text())["placement"]["device"]
        good = placed.startswith(checks.options.device)
        summary = f"{len(steps)} steps on {placed}, loss {steps[0]['loss']:.4f} to {steps[-1]['loss']:.4f}, "
        summary += f"{speed:,.0f} tokens/s, peak {max(peaks) / 2**30:.2f} GiB, stall {stall:.2f} s"
        if faults:
            kills = output.count("was killed by SIGKILL")
            summary += f", {kills} teachers killed and started again"
            good = good and kills > 0
        if checks.gpu and expected and not faults:
            good = good and abs(max(peaks) / expected["peak_bytes"] - 1) <= MEMORY_BAND
        return (PASSED if good else FAILED), summary, figures

    mode = "colocated" if name == "colocated" else "disaggregated"
    command = [sys.executable, "-m", "disaggkd_cli", "run", str(config), f"mode={mode}", f"run_dir={run_dir}",
               "--restarts", "30" if faults else "0", *overrides]  # fmt: skip
    said = ""
    if expected:
        said = f"peak {expected['peak_bytes'] / 2**30:.2f} GiB (within {MEMORY_BAND:.0%} on a GPU), "
        said += f"{expected['tokens_per_second']:,.0f} tokens/s where no role shares a GPU"
    if faults:
        said = "all steps, at least one teacher killed and started again"
    variables = {"DISAGGKD_TESTING": "1", "DISAGGKD_FAULT": faults} if faults else {}
    step = checks.step(f"{name} run", command, limit, read, needs, claim=claim, expected=said, variables=variables)
    if (run_dir / "logs").is_dir():
        shutil.copytree(run_dir / "logs", checks.out / "logs" / f"{name.replace(' ', '_')}_run", dirs_exist_ok=True)
    return step


def compare_runs(checks: Checks, name: str, one: str, other: str, *, tolerance: float = LOSS_TOLERANCE) -> None:
    """Step: the losses of two runs, step by step."""
    step = Step(name, claim=f"losses of the {one} and the {other} run are the same",
                expected=f"relative differences of at most {tolerance:g}")  # fmt: skip
    checks.steps.append(step)
    if checks.show:
        step.status = WOULD_RUN
        print(f"{len(checks.steps):2}. {name}: {step.claim}\n    expected: {step.expected}")
        return
    found = {each.name: each.figures["losses"] for each in checks.steps if "losses" in each.figures}
    pair = [found.get(f"{which} run") for which in (one, other)]
    if None in pair or not all(pair):
        step.summary = "needs both runs"
    elif len(pair[0]) != len(pair[1]):
        step.status, step.summary = FAILED, f"{len(pair[0])} steps beside {len(pair[1])}"
    else:
        worst = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(*pair, strict=True))
        step.status = PASSED if worst <= tolerance else FAILED
        step.summary = f"{len(pair[0])} steps, largest relative difference {worst:.1e}"
        step.figures = {"largest_relative_difference": worst}
    print(f"  {step.status:9} {step.name}: {step.summary}")


def two_gpus(checks: Checks, config: Path, needs: Needs) -> None:
    """Links over NCCL: a run, a teacher killed while a payload travels, and the ten minutes after it."""
    # The first link fails after 270 s, the last step ends 630 s later at the earliest: a watchdog sleeps 480 s.
    steps, slow, killed = (4, 0.2, 3) if checks.options.small else (30, 30, 9)
    backend = f"transport.backend={'nccl' if checks.gpu else 'gloo'}"
    check_run(checks, "nccl", config, needs, (backend,), planned="disaggregated",
              claim="hidden states travel from GPU to GPU over NCCL")  # fmt: skip
    check_run(checks, "killed peer", config, needs, (backend,), faults=f"teacher 0.payload:kill@{killed}",
              claim="a teacher that dies while a payload travels costs its link alone")  # fmt: skip
    compare_runs(checks, "same losses in spite of it", "killed peer", "nccl")
    check_run(checks, "outlived watchdog", config, needs, (backend, f"train.steps={steps}"), limit=1300,
              faults=f"teacher 0.payload:kill@{killed},teacher 0.forward:sleep:{slow}",
              claim="no watchdog ends the run in the ten minutes after a link failed")  # fmt: skip


def eight_gpus(checks: Checks, config: Path, needs: Needs) -> None:
    """FSDP's collectives beside the transfers of many links, for long."""
    half = 4 if checks.gpu else 2
    backend = f"transport.backend={'nccl' if checks.gpu else 'gloo'}"
    ranks = (backend, f"student.ranks={half}", f"teacher.replicas={half}")
    check_run(checks, "sharded", config, needs, ranks, limit=300,
              claim=f"{half} student ranks reduce beside the payloads of {half} teachers")  # fmt: skip
    check_run(checks, "hsdp", config, needs, (*ranks, "student.replicate=2"), limit=300,
              claim=f"so do replicas of the student, with {half * half} links")  # fmt: skip
    compare_runs(checks, "same losses with replicas", "hsdp", "sharded")
    check_run(checks, "killed among many", config, needs, ranks, faults="teacher 1.payload:kill@3", limit=300,
              claim="one teacher of many that dies costs its links alone")  # fmt: skip
    compare_runs(checks, "same losses with one killed", "killed among many", "sharded")
    count = 6 if checks.options.small else checks.options.soak_steps
    step = check_run(checks, "soak", config, needs, (*ranks, f"train.steps={count}"), limit=4500, planned="sharded",
                     claim=f"{count} steps run without a hang")  # fmt: skip
    check_growth(checks, step)


def check_growth(checks: Checks, soak: Step) -> None:
    """Step: memory of the soak's second half beside that of its first."""
    step = Step("memory of the soak", claim="memory does not grow", expected=f"within {GROWTH:.0%} of the first half")
    checks.steps.append(step)
    if checks.show:
        step.status = WOULD_RUN
        print(f"{len(checks.steps):2}. {step.name}: {step.claim}\n    expected: {step.expected}")
        return
    peaks = soak.figures.get("peaks", [])
    if soak.status not in (PASSED, FAILED) or len(peaks) < 2:
        step.status, step.summary = NOT_RUN, "needs the soak"
    else:
        first, second = max(peaks[: len(peaks) // 2]), max(peaks[len(peaks) // 2 :])
        step.status = PASSED if second <= first * (1 + GROWTH) or not checks.gpu else FAILED
        step.summary = f"{first / 2**30:.2f} GiB, then {second / 2**30:.2f} GiB"
    print(f"  {step.status:9} {step.name}: {step.summary}")
