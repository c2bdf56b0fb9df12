"""On-policy against off-policy in equal time, on the quickstart's pair: one start, two ways to go on from it.

    python scripts/on_policy_example.py [--assets DIR] [--runs DIR] [--write]

1. *Start*: 20 of SmolLM2-135M-Instruct's 30 layers learn off-policy (`configs/quickstart.yaml`, its layers recorded).
2. *On-policy*: `configs/on-policy.yaml` goes on from it.
3. *Off-policy*: the same config with `on_policy.fraction=0`, with as many steps as take as long by the start's steps.

All three are measured alike: held-out prompts are continued with the same random numbers, and the teacher judges each
student's own words; and perplexity and divergence on held-out text. `--write` puts the table into docs/results.md. It
takes some 8 minutes on two cores, and wants a machine that does nothing else; `scripts/fetch_assets.py` goes before it.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import nn
from transformers import AutoModelForCausalLM

from disaggkd_cli.bench.runs import machine
from disaggkd_cli.config import load
from disaggkd_cli.data import MicroBatch, TokenizedDataset, collate, load_splits, load_tokenizer
from disaggkd_cli.on_policy.completions import Completion
from disaggkd_cli.on_policy.generate import end_ids, generate
from disaggkd_cli.on_policy.prompts import prompt_of
from disaggkd_cli.on_policy.sampling import Sampler
from disaggkd_cli.on_policy.uniforms import uniforms

ROOT = Path(__file__).parents[1]
LAYERS = json.loads((ROOT / "docs" / "quickstart_control.json").read_text())["layers"]
"""What `best_20` finds, which takes a minute and a half."""
PROMPTS, TOKENS, PROMPT_TOKENS, HELD_OUT = 16, 64, 32, 8
BEGIN, END = (
    "<!-- on-policy example: begin (scripts/on_policy_example.py --write) -->",
    "<!-- on-policy example: end -->",
)


def run(config: Path, directory: Path, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Do one run, and return the metrics lines of its steps."""
    shutil.rmtree(directory, ignore_errors=True)
    command = [sys.executable, "-m", "disaggkd_cli", "run", str(config), f"run_dir={directory}", *overrides]
    print("$ disaggkd", *command[3:], flush=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def trained_seconds(steps: Sequence[dict[str, Any]]) -> float:
    """Seconds of all steps, writing and waiting included; evaluations, loading and export apart."""
    return sum(line["step_seconds"] for line in steps)


@torch.inference_mode()
def judged(student: nn.Module, teacher: nn.Module, batches: Sequence[MicroBatch]) -> dict[str, float]:
    """Both divergences and the student's cross-entropy a supervised row, in nats, by plain softmaxes."""
    sums, rows = dict.fromkeys(("forward_kl", "reverse_kl", "ce"), 0.0), 0
    for batch in batches:
        mine, theirs = (
            torch.log_softmax(
                one(input_ids=batch.input_ids, position_ids=batch.position_ids).logits.flatten(0, 1)[batch.rows], -1
            )
            for one in (student, teacher)
        )
        apart = theirs - mine
        sums["forward_kl"] += float((theirs.exp() * apart).sum())
        sums["reverse_kl"] -= float((mine.exp() * apart).sum())
        sums["ce"] -= float(mine.gather(1, batch.row_labels[:, None]).sum())
        rows += batch.supervised_count
    return {name: value / rows for name, value in sums.items()}


def continued(student: nn.Module, tokenizer: Any, held_out: TokenizedDataset) -> list[Completion]:
    """What a student writes after the first held-out prompts, with the same numbers for every student."""
    prompts = [prompt_of(held_out.sequence(index), PROMPT_TOKENS).tolist() for index in range(PROMPTS)]
    found = []
    for begin in range(0, PROMPTS, 16):
        some = prompts[begin : begin + 16]
        numbers = np.stack([uniforms(1, "example", begin + at, 0, TOKENS) for at in range(len(some))])
        sampler = Sampler(1.0, 1.0, 0, len(tokenizer))
        written = generate(
            student, some, numbers, sampler, end_ids(student, tokenizer), tokenizer.eos_token_id, torch.device("cpu")
        )
        found += [
            Completion(begin + at, tuple(some[at]), one.ids, one.stopped, one.entropy) for at, one in enumerate(written)
        ]
    return found


def measured(path: Path, teacher: nn.Module, tokenizer: Any, held_out: TokenizedDataset) -> dict[str, Any]:
    """One row of the table."""
    student = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        texts = continued(student, tokenizer, held_out)
    own = [collate([one.sequence() for one in texts[at : at + 4]], 0) for at in range(0, len(texts), 4)]
    given = [collate([held_out.sequence(PROMPTS + index)], 0) for index in range(HELD_OUT)]
    on_own, on_text = judged(student, teacher, own), judged(student, teacher, given)
    tokens = sum(len(one.ids) for one in texts)
    return {
        "own_reverse_kl": on_own["reverse_kl"],
        "own_forward_kl": on_own["forward_kl"],
        "held_out_forward_kl": on_text["forward_kl"],
        "held_out_perplexity": math.exp(on_text["ce"]),
        "entropy": sum(one.entropy for one in texts) / tokens,
        "completion_tokens_mean": tokens / len(texts),
        "sample": [tokenizer.decode(texts[0].prompt), tokenizer.decode(texts[0].ids)],
    }


def table(result: dict[str, Any]) -> str:
    """The section for docs/results.md."""
    host = result["machine"]
    lines = [
        f"`python scripts/on_policy_example.py`: {result['start_steps']} steps off-policy, then either way from there; "
        f"{PROMPTS} held-out prompts, up to {TOKENS} tokens each, {HELD_OUT} held-out sequences. {host}; "
        "not run on a GPU.",
        "",
        "| student | steps | seconds of steps | reverse KL on its own continuations | forward KL there | forward KL on "
        "held-out text | perplexity there | entropy of what it draws |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, one in result["students"].items():
        own = f"{one['own_reverse_kl']:.3f} | {one['own_forward_kl']:.3f}"
        text = f"{one['held_out_forward_kl']:.3f} | {one['held_out_perplexity']:.1f}"
        lines.append(f"| {name} | {one['steps']} | {one['seconds']:.0f} | {own} | {text} | {one['entropy']:.2f} |")
    lines += ["", f"After {result['students']['start']['sample'][0]!r}:", ""]
    lines += [f"* {name}: {one['sample'][1]!r}" for name, one in result["students"].items()]
    return "\n".join(lines)


def main() -> None:
    """Train, measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, default=Path("assets"))
    parser.add_argument("--runs", type=Path, default=Path("runs/on-policy-example"))
    parser.add_argument("--start-steps", type=int, default=10)
    parser.add_argument("--steps", type=int, default=12, help="of the on-policy run")
    parser.add_argument("--write", action="store_true", help="the table into docs/results.md")
    asked = parser.parse_args()
    began = time.monotonic()
    teacher, runs = asked.assets / "smollm2-135m-instruct", asked.runs
    texts = asked.assets / "austen"
    runs.mkdir(parents=True, exist_ok=True)
    common = [
        f"teacher.model={teacher}", f"data.train={texts if texts.is_dir() else 'builtin:pydoc'}", "train.eval_every=0",
        "train.save_every=0", "data.eval_sequences=4", "log.samples=0",
    ]  # fmt: skip
    steps = {
        "start": run(
            ROOT / "configs" / "quickstart.yaml", runs / "start",
            [*common, f"student.from_teacher.layers={LAYERS}", f"train.steps={asked.start_steps}"],
        ),
    }  # fmt: skip
    going_on = ROOT / "configs" / "on-policy.yaml"
    common.append(f"student.model={runs / 'start' / 'student'}")
    steps["on-policy"] = run(going_on, runs / "on-policy", [*common, f"train.steps={asked.steps}"])
    a_step = trained_seconds(steps["start"][2:]) / len(steps["start"][2:])
    as_long = max(1, round(trained_seconds(steps["on-policy"]) / a_step))
    steps["off-policy"] = run(
        going_on, runs / "off-policy", [*common, f"train.steps={as_long}", "on_policy.fraction=0.0"]
    )
    judge = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(str(teacher))
    config = load(str(runs / "off-policy" / "config.yaml"), [])
    held_out = load_splits(config.data, tokenizer, pack=False, seed=config.seed).evaluation
    students = {
        name: {
            "steps": len(lines), "seconds": trained_seconds(lines),
            **measured(runs / name / "student", judge, tokenizer, held_out),
        }
        for name, lines in steps.items()
    }  # fmt: skip
    host = machine()
    told = f"{host['processor']}, {host['cores']} cores, torch {host['torch']}"
    result = {"machine": told, "start_steps": asked.start_steps, "students": students}
    (runs / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    print(yaml.safe_dump({name: {k: v for k, v in one.items() if k != "sample"} for name, one in students.items()}))
    print(table(result), f"\n{time.monotonic() - began:.0f} s in all")
    if asked.write:
        page = ROOT / "docs" / "results.md"
        text = page.read_text()
        if BEGIN not in text:
            text += f"\n## On-policy against off-policy, in equal time\n\n{BEGIN}{END}\n"
        before, rest = text.split(BEGIN)
        page.write_text(f"{before}{BEGIN}\n\n{table(result)}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
