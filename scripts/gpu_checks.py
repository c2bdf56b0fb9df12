"""The steps of scripts/gpu_checks.sh, what is most likely to fail first. Standard library only.

Each step is a process of its own with a time limit, and each has a claim: what its passing shows.
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
import xml.etree.ElementTree as ElementTree
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpu_checks_engine import (  # noqa: E402
    FAILED,
    NOT_RUN,
    PASSED,
    ROOT,
    TOO_BIG,
    Checks,
    json_of,
    last_line,
    report,
)
from gpu_checks_runs import check_run, compare_runs, eight_gpus, two_gpus  # noqa: E402

NEEDED = ("torch", "transformers", "numpy", "omegaconf", "psutil", "rich", "safetensors", "typer")
FOR_TESTS = ("pytest",)
HELPFUL = ("datasets", "triton", "flash-linear-attention", "causal-conv1d", "liger-kernel", "trl", "pytest-timeout")
LOSS_OVER_FLOOR = 1.4
"""Of the loss's cost model, for the reference head with room for a good tiling."""
PARTS = {"one": 1, "two": 2, "eight": 8}
"""And the GPUs that each needs."""


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
        found = json_of(output)
        checks.machine |= found
        what = f"{found['gpus'][0]}, {found['memory_gib']} GiB, CUDA {found['cuda']}" if found["gpus"] else "CPU"
        return PASSED, f"{what}; torch {found['torch']}", found

    checks.step(
        "machine",
        [sys.executable, "scripts/gpu_machine.py", checks.options.device],
        90,
        read,
        ("torch",),
        claim="torch sees a GPU, and the loss knows its generation",
    )


def check_tests(checks: Checks, name: str = "gpu tests", target: str = "tests/gpu", claim: str = "", chosen: str = "",
                limit: float = 180) -> None:  # fmt: skip
    """Step: tests of tests/gpu; `chosen` as pytest's -k. Skipped tests do not count as passed."""
    results = checks.out / f"{name.replace(' ', '_')}.xml"

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
    command = [sys.executable, "-m", "pytest", target, "-m", "gpu", "-q", "-o", "addopts=", "-p",
               "no:cacheprovider", f"--junitxml={results}"]  # fmt: skip
    command += ["-k", chosen] if chosen else []
    checks.step(name, command, limit, read, ("torch", "transformers", "pytest"), claim=claim,
                expected="every test passes")  # fmt: skip


def check_loss(checks: Checks) -> None:
    """Step: `bench loss` on the reference head, or on the next smaller shape that the memory holds."""
    predicted = checks.expected.get("loss")
    expected = f"fused within {LOSS_OVER_FLOOR:g} x gemm_floor"
    if predicted:
        expected += (f"; by the cost model {1e3 * predicted['fused']:.0f} ms at 4 GiB of scratch, the products alone "
                     f"{1e3 * predicted['floor']:.0f} ms")  # fmt: skip
    shapes = [["--head", "reference", "--budget", "4GiB", "--repeats", "3"],
              ["--head", "reference", "--rows", "4096", "--vocabulary", "151936", "--repeats", "3"],
              ["--head", "reference", "--rows", "4096", "--vocabulary", "65536", "--student-width", "2048", "--budget",
               "1GiB", "--repeats", "3"]]  # fmt: skip
    if checks.options.small:
        shapes = [["--head", "reference", "--rows", "64", "--vocabulary", "2048", "--student-width", "64",
                   "--teacher-width", "32", "--budget", "16MiB", "--repeats", "1", "--no-peers"]]  # fmt: skip

    def read(output: str) -> tuple[str, str, dict]:
        result = json_of(output)
        seconds = {}
        for row in result["rows"]:
            seconds.setdefault(row["implementation"], row["seconds"])
        fused = [row for row in result["rows"] if row["implementation"] == "fused"]
        parts = [f"V={result['options']['vocabulary']}, {result['options']['rows']} rows"]
        parts += [f"{name} {1e3 * value:.1f} ms" for name, value in seconds.items()]
        parts += [f"scratch {fused[0]['scratch_bytes'] / 2**30:.2f} GiB, error {fused[0]['gradient_error']:.1e}"]
        parts += [f"not run: {one['implementation']} ({one['reason'][:60]})" for one in result["absent"]]
        good = fused[0]["gradient_error"] < 1e-2
        if checks.gpu and "gemm_floor" in seconds:
            good = good and seconds["fused"] <= LOSS_OVER_FLOOR * seconds["gemm_floor"]
        return (PASSED if good else FAILED), "; ".join(parts), result

    for number, shape in enumerate(shapes):
        name = "bench loss" if not number else f"bench loss, smaller {number}"
        command = [sys.executable, "-m", "disaggkd_cli", "bench", "loss", "--device", checks.options.device, "--json"]
        step = checks.step(
            name,
            [*command, *shape],
            150,
            read,
            ("torch", "typer", "omegaconf"),
            claim="the fused loss costs little more than its matrix products",
            expected=expected,
        )
        if step.status != FAILED or "out of memory" not in step.summary.lower():
            return
        if number + 1 < len(shapes):
            step.status = TOO_BIG


def check_link(checks: Checks) -> None:
    """Step: `bench link`, over loopback."""
    sizes = ["--payload", "64KiB"] if checks.options.small else ["--payload", "1MiB", "--payload", "32MiB"]

    def read(output: str) -> tuple[str, str, dict]:
        report = json_of(output)
        rows = [f"{row['payload_bytes'] / 2**20:g} MiB: {row['bytes_per_second'] / 1e9:.2f} GB/s (raw gloo "
                f"{row['raw_bytes_per_second'] / 1e9:.2f})" for row in report["rows"]]  # fmt: skip
        return PASSED, "; ".join(rows), report

    command = [sys.executable, "-m", "disaggkd_cli", "bench", "link", "--json", "--links", "1", "--rounds", "3", *sizes]
    checks.step(
        "bench link",
        command,
        90,
        read,
        ("torch", "typer", "omegaconf"),
        claim="a link carries what raw gloo carries",
        expected="near 1.0 of raw at 32 MiB",
    )


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


def check_config(checks: Checks, config: Path) -> None:
    """Step: `disaggkd check` on the pair."""

    def read(output: str) -> tuple[str, str, dict]:
        return PASSED, last_line(output), {}

    command = [sys.executable, "-m", "disaggkd_cli", "check", str(config)]
    checks.step(
        "disaggkd check",
        command,
        120,
        read,
        (*NEEDED, "random pair"),
        claim="losses, heads, masks and the wire of the pair are proved on this GPU",
        expected="every proof passes",
    )


def find_expected(checks: Checks, config: Path) -> None:
    """Ask the closed forms what they predict for this GPU, from shapes alone."""
    shapes = [sys.executable, "scripts/make_random_pair.py", str(checks.work / "pair"), "--config-only"]
    shapes += ["--small"] if checks.options.small else []
    names = checks.machine.get("gpus") or ["no GPU"]
    asked = [sys.executable, "scripts/gpu_expected.py", str(config), names[0]]
    try:
        subprocess.run(shapes, cwd=ROOT, check=True, capture_output=True, timeout=90)
        answer = subprocess.run(asked, cwd=ROOT, check=True, capture_output=True, text=True, timeout=90)
        checks.expected = json_of(answer.stdout)
        print(f"expected figures are those of {checks.expected['gpu']}")
    except (subprocess.SubprocessError, ValueError, OSError) as error:
        said = (getattr(error, "stderr", "") or "")[-300:]
        print(f"no expected figures: {type(error).__name__}: {error} {said}")


def one_gpu(checks: Checks, config: Path) -> None:
    """The steps that a single GPU can take."""
    for name, file, claim in (
        (
            "gpu models",
            "test_gpu_models",
            "models compute on the GPU what they do on the CPU (kernels of fla, masks)",
        ),
        ("gpu loss", "test_gpu_loss", "the loss's compiled kernels give the values of float64"),
        ("gpu payloads", "test_gpu_payloads", "hidden states arrive whole from another process of this GPU"),
        ("gpu runs", "test_gpu_runs", "a whole tiny run has the same losses disaggregated and colocated"),
    ):
        chosen = "not two_gpus" if name == "gpu payloads" else ""
        check_tests(checks, name, f"tests/gpu/{file}.py", claim, chosen)
    check_pair(checks)
    needs = (*NEEDED, "random pair")
    check_run(checks, "disaggregated", config, needs, claim="a pair of Qwen3.5's shape trains disaggregated")
    check_run(checks, "colocated", config, needs, claim="the same pair trains colocated")
    compare_runs(checks, "same losses", "disaggregated", "colocated")
    check_loss(checks)
    check_config(checks, config)
    check_link(checks)


def main() -> int:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    parser.add_argument("--part", action="append", choices=tuple(PARTS), help="for how many GPUs; all that are here")
    parser.add_argument("--what-would-run", action="store_true", help="print steps, claims, expected figures")
    parser.add_argument("--budget", type=float, help="seconds for everything (570 for one GPU, 2000, 6000)")
    parser.add_argument("--soak-steps", type=int, default=3000, help="optimizer steps of the soak on eight GPUs")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "gpu_checks"))
    options = parser.parse_args()
    options.out = options.out.resolve()
    wanted, chosen = options.what_would_run, options.part
    options.budget = options.budget or {"eight": 6000, "two": 2000}.get((chosen or ["one"])[-1], 570)
    (options.out / "logs").mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    checks = Checks(options)
    if not wanted:
        check_packages(checks)
    check_machine(checks)
    if checks.steps[0].status == PASSED or wanted:
        here = len(checks.machine.get("gpus") or [])
        config = write_config(checks)
        find_expected(checks, config)
        parts = chosen or [part for part, gpus in PARTS.items() if wanted or gpus <= max(here, 1)]
        if "one" in parts:
            one_gpu(checks, config)
        elif {"two", "eight"} & set(parts):
            check_pair(checks)
        if "two" in parts:
            check_tests(checks, "nccl link", "tests/gpu/test_gpu_payloads.py",
                        "NCCL links form between two GPUs and carry whole payloads", "two_gpus")  # fmt: skip
            two_gpus(checks, config, (*NEEDED, "random pair"))
        if "eight" in parts:
            eight_gpus(checks, config, (*NEEDED, "random pair"))
    shutil.rmtree(checks.work, ignore_errors=True)  # models and checkpoints, gigabytes of them
    return 0 if wanted else report(checks)


if __name__ == "__main__":
    sys.exit(main())
