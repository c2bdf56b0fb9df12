"""Predicted against traced memory of student steps, as the Markdown table of docs/planner.md.

    python scripts/planner_verification.py [NAME ...]

Each case runs `disaggkd plan --verify`'s tracing in a process of its own: a few layers on fake tensors, on the CPU.
"""

from __future__ import annotations

import subprocess
import sys

USUAL = {"ranks": 8, "tokens": 4096, "sequence": 4096, "bytes": 2, "implementation": "fused"}
CASES = {
    "qwen3-0.6b": {},
    "qwen3-0.6b, full logits": {"implementation": "full"},
    "qwen3-1.7b, checkpointed": {"tokens": 8192, "checkpointing": True},
    "qwen3-8b": {"ranks": 16, "tokens": 8192},
    "qwen3-8b, packed": {"ranks": 64, "tokens": 8192, "sequence": 2048, "packed": True},
    "llama-3.1-8b": {"tokens": 8192, "sequence": 8192},
    "llama-3.2-1b, float32": {"ranks": 4, "tokens": 2048, "sequence": 1024, "bytes": 4},
    "smollm2-360m, packed": {"ranks": 2, "sequence": 2048, "packed": True},
    "qwen3-32b, every layer": {"ranks": 32, "tokens": 8192, "sequence": 8192, "layers": 64},
    "llama-3.1-70b": {"ranks": 64, "tokens": 8192, "sequence": 8192},
    "gemma-3-4b": {"sequence": 2048},
    "qwen3-30b-a3b, experts": {"ranks": 32},
    "qwen3.5-9b, delta net": {"tokens": 2048, "sequence": 512},
    "qwen3.5-35b-a3b, experts and delta net": {"ranks": 16, "tokens": 2048, "sequence": 512},
}


def run_case(name: str) -> str:
    """One row of the table."""
    from disaggkd_cli.planner.hardware import load_catalogue
    from disaggkd_cli.planner.models import hub_config, resolve_model
    from disaggkd_cli.planner.verify import MAX_LAYERS, verify
    from disaggkd_cli.planner.workload import Cluster, Efficiency, Workload

    model, option = name.split(",")[0], USUAL | CASES[name]
    gpu = load_catalogue().gpus["H100-SXM"]
    work = Workload(
        resolve_model("qwen3-8b", "teacher"),
        resolve_model(model, "student"),
        Cluster(gpu, gpu, 8, 50.0),
        Efficiency(0.5, 0.4),
        student_ranks=option["ranks"],
        micro_batch_tokens=option["tokens"],
        sequence=option["sequence"],
        student_bytes=option["bytes"],
        checkpointing=option.get("checkpointing", False),
        packed=option.get("packed", False),
        implementation=option["implementation"],
    )
    result = verify(work, hub_config(model, "student"), option.get("layers", MAX_LAYERS))
    predicted, traced = sum(result.predicted.values()) / 2**30, sum(result.traced.values()) / 2**30
    layers = f"{len(result.work.student.layers)} layers"
    return (
        f"| {name} | {layers}, {result.work.micro_batch_tokens:,} tokens, {option['ranks']} ranks, "
        f"{option['implementation']} | "
        f"{result.phase} | {predicted:.3f} | {traced:.3f} | {result.error:+.2%} | {result.band:.0%} |"
    )


def main(names: list[str]) -> int:
    """Print the table; 1 when a case is outside its band or fails."""
    print(
        "| student | traced | fullest phase | predicted GiB | traced GiB | error | band "
        "|\n|---|---|---|---:|---:|---:|---:|"
    )
    failed = 0
    for name in names or list(CASES):
        done = subprocess.run([sys.executable, __file__, "--case", name], capture_output=True, text=True, timeout=600)
        print(done.stdout.strip() or f"| {name} | failed: {done.stderr.strip().splitlines()[-1:]} |", flush=True)
        failed += done.returncode
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(run_case(sys.argv[2]))
    else:
        sys.exit(main(sys.argv[1:]))
