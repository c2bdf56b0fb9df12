"""What the quickstart's student has learnt: teacher, student before and after, and the same trained without a teacher.

    python scripts/quickstart_table.py assets/smollm2-135m-instruct runs/quickstart
    python scripts/quickstart_table.py TEACHER runs/quickstart-control --record docs/quickstart_control.json

Every model is measured on texts held out from the novels and on texts of another kind (reference prose of Python's
standard library), and answers one question. The column without a teacher is a recorded one (`make quickstart-control`
trains and records it); its date and machine stand below the table.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from disaggkd_cli.config import Config, load
from disaggkd_cli.data import MicroBatch, collate, load_tokenizer
from disaggkd_cli.losses import fused_kd_loss
from disaggkd_cli.models import backbone_of, head_of, hidden_states, student_from_layers
from disaggkd_cli.training.layer_choice import recorded_layers
from disaggkd_cli.training.texts import read_texts

QUESTION = "What is the capital of France?"
CONTROL = Path(__file__).parents[1] / "docs" / "quickstart_control.json"
SEQUENCES = {"novels": 8, "other text": 8}


def texts_of(config: Config, tokenizer: Any) -> dict[str, list[MicroBatch]]:
    """Return held-out sequences of the run, and as long ones of a text that no run here trains on."""

    def first(config: Config, count: int) -> list[MicroBatch]:
        held_out = read_texts(config, tokenizer, True, lambda line: None).evaluation
        return [collate([held_out.sequence(index)], 0) for index in range(min(count, len(held_out)))]

    other = load(
        Path(config.run_dir) / "config.yaml", ["data.train=builtin:pydoc", "data.eval=0.05", "data.format=auto"]
    )
    return {"novels": first(config, SEQUENCES["novels"]), "other text": first(other, SEQUENCES["other text"])}


@torch.inference_mode()
def measure(model: nn.Module, teacher: nn.Module, batches: Sequence[MicroBatch]) -> dict[str, float]:
    """Return perplexity, KL from the teacher in nats a token, and the share of tokens where both like the same best."""
    sums = {"ce": 0.0, "kd": 0.0, "top1_agreement": 0.0}
    rows = sum(batch.supervised_count for batch in batches)
    for batch in batches:
        states = [hidden_states(backbone_of(one), batch.input_ids, batch.position_ids)[0] for one in (model, teacher)]
        mine, theirs = (one[batch.rows] for one in states)
        out = fused_kd_loss(
            mine, head_of(model), theirs, head_of(teacher), batch.row_labels, ce_weight=1.0, num_tokens=rows
        )
        for name in sums:
            sums[name] += getattr(out, name).item()
    return {"perplexity": math.exp(min(700.0, sums["ce"])), "kd": sums["kd"], "agreement": sums["top1_agreement"]}


@torch.inference_mode()
def answer(model: nn.Module, tokenizer: Any, tokens: int) -> str:
    """Return what a model says to the question, greedily."""
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(
        **inputs, max_new_tokens=tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id
    )
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def describe(model: nn.Module, teacher: nn.Module, texts: dict[str, list[MicroBatch]], tokenizer: Any) -> dict:
    """Return one column of the table."""
    column = {name: measure(model, teacher, batches) for name, batches in texts.items()}
    return {**column, "answer": answer(model, tokenizer, 20)}


def show(columns: dict[str, dict], control: dict | None) -> None:
    """Print the table."""
    table = Table(title="What distillation keeps", title_justify="left", show_lines=True)
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for text in SEQUENCES:
        table.add_row(f"{text}: perplexity", *(f"{column[text]['perplexity']:.1f}" for column in columns.values()))
        table.add_row(f"{text}: KL from the teacher", *(f"{column[text]['kd']:.3f}" for column in columns.values()))
        shares = (f"{100 * column[text]['agreement']:.1f}%" for column in columns.values())
        table.add_row(f"{text}: same best token", *shares)
    table.add_row(QUESTION, *(column["answer"] for column in columns.values()))
    console = Console()
    console.print(table)
    if control:
        console.print(
            "cross-entropy alone: the same start, texts, order and steps without a teacher, recorded "
            f"{control['date']} on {control['machine']} by `make quickstart-control`",
            highlight=False,
        )


def main() -> None:
    """Measure and print, or record a run as the control."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--record", type=Path, help="write this run's column here instead of printing a table")
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    config = load(options.run_dir / "config.yaml", [f"run_dir={options.run_dir}"])
    tokenizer = AutoTokenizer.from_pretrained(options.teacher)
    texts = texts_of(config, load_tokenizer(options.teacher))
    teacher = AutoModelForCausalLM.from_pretrained(options.teacher, dtype=torch.bfloat16).eval()
    student = AutoModelForCausalLM.from_pretrained(options.run_dir / "student", dtype=torch.bfloat16).eval()
    distilled = describe(student, teacher, texts, tokenizer)
    layers = recorded_layers(options.run_dir)
    if options.record:
        machine = f"{os.cpu_count()} cores of {_processor()}, torch {torch.__version__}"
        figures = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "layers": layers, "column": distilled}
        options.record.write_text(json.dumps(figures, indent=1) + "\n")
        return
    control = json.loads(CONTROL.read_text()) if CONTROL.exists() else None
    before = student_from_layers(teacher, layers, torch.bfloat16).eval()
    columns = {
        "teacher": describe(teacher, teacher, texts, tokenizer),
        "before": describe(before, teacher, texts, tokenizer),
        "distilled": distilled,
    }
    if control:
        columns["cross-entropy alone"] = control["column"]
    show(columns, control)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


if __name__ == "__main__":
    main()
