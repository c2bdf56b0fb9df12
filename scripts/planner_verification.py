"""Predicted against traced memory of student steps, as the Markdown table of docs/planner.md.

    python scripts/planner_verification.py [NAME ...]

Each case runs `disaggkd plan --verify`'s tracing in a process of its own: a few layers on fake tensors, on the CPU.
"""

from __future__ import annotations

import subprocess
import sys

CASES = {
    "qwen3-0.6b": ("qwen3-0.6b", "ranks=8 tokens=4096 sequence=4096 bytes=2 checkpointing=0 implementation=fused packed=0"),
    "qwen3-0.6b full": ("qwen3-0.6b", "ranks=8 tokens=4096 sequence=4096 bytes=2 checkpointing=0 implementation=full packed=0"),
    "qwen3-1.7b checkpointed": ("qwen3-1.7b", "ranks=8 tokens=8192 sequence=4096 bytes=2 checkpointing=1 implementation=fused packed=0"),
    "qwen3-8b": ("qwen3-8b", "ranks=16 tokens=8192 sequence=4096 bytes=2 checkpointing=0 implementation=fused packed=0"),
    "qwen3-8b packed": ("qwen3-8b", "ranks=64 tokens=8192 sequence=2048 bytes=2 checkpointing=0 implementation=fused packed=1"),
    "llama-3.1-8b": ("llama-3.1-8b", "ranks=8 tokens=8192 sequence=8192 bytes=2 checkpointing=0 implementation=fused packed=0"),
    "llama-3.2-1b float32": ("llama-3.2-1b", "ranks=4 tokens=2048 sequence=1024 bytes=4 checkpointing=0 implementation=fused packed=0"),
    "smollm2-360m, 2 ranks": ("smollm2-360m", "ranks=2 tokens=4096 sequence=2048 bytes=2 checkpointing=0 implementation=fused packed=1"),
    "gemma-3-4b": ("gemma-3-4b", "ranks=8 tokens=4096 sequence=2048 bytes=2 checkpointing=0 implementation=fused packed=0"),
    "qwen3-30b-a3b (MoE)": ("qwen3-30b-a3b", "ranks=32 tokens=4096 sequence=4096 bytes=2 checkpointing=0 implementation=fused packed=0"),
    "qwen3.5-9b (delta net)": ("qwen3.5-9b", "ranks=8 tokens=2048 sequence=512 bytes=2 checkpointing=0 implementation=fused packed=0"),
    "qwen3.5-35b-a3b (both)": ("qwen3.5-35b-a3b", "ranks=16 tokens=2048 sequence=512 bytes=2 checkpointing=0 implementation=fused packed=0"),
}  # fmt: skip


def run_case(name: str) -> str:
    """One row of the table."""
    from disaggkd_cli.planner.hardware import load_catalogue
    from disaggkd_cli.planner.models import hub_config, resolve_model
    from disaggkd_cli.planner.verify import verify
    from disaggkd_cli.planner.workload import Cluster, Efficiency, Workload

    model, text = CASES[name]
    option = dict(part.split("=") for part in text.split())
    gpu = load_catalogue().gpus["H100-SXM"]
    work = Workload(
        resolve_model("qwen3-8b", "teacher"), resolve_model(model, "student"), Cluster(gpu, gpu, 8, 50.0), Efficiency(0.5, 0.4),
        student_ranks=int(option["ranks"]), micro_batch_tokens=int(option["tokens"]), sequence=int(option["sequence"]),
        student_bytes=int(option["bytes"]), checkpointing=option["checkpointing"] == "1", packed=option["packed"] == "1",
        implementation=option["implementation"],
    )  # fmt: skip
    result = verify(work, hub_config(model, "student"))
    predicted, traced = sum(result.predicted.values()) / 2**30, sum(result.traced.values()) / 2**30
    layers = f"{len(result.work.student.layers)} layers"
    return (
        f"| {name} | {layers}, {result.work.micro_batch_tokens:,} tokens, {option['ranks']} ranks, {option['implementation']} | "
        f"{result.phase} | {predicted:.3f} | {traced:.3f} | {result.error:+.2%} | {result.band:.0%} |"
    )


def main(names: list[str]) -> int:
    """Print the table; 1 when a case is outside its band or fails."""
    print("| student | traced | fullest phase | predicted GiB | traced GiB | error | band |\n|---|---|---|---|---|---|---|")
    failed = 0
    for name in names or list(CASES):
        done = subprocess.run([sys.executable, __file__, "--case", name], capture_output=True, text=True, timeout=170)
        print(done.stdout.strip() or f"| {name} | failed: {done.stderr.strip().splitlines()[-1:]} |", flush=True)
        failed += done.returncode
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(run_case(sys.argv[2]))
    else:
        sys.exit(main(sys.argv[1:]))
