"""Let teacher and student go on from the same words, greedily, side by side.

python scripts/compare_sentences.py assets/smollm2-135m-instruct runs/quickstart/student
"""

from __future__ import annotations

import argparse
import logging

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = "It is a truth universally acknowledged, that a single man"


def continuation(directory: str, prompt: str, tokens: int) -> str:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        ids = model.generate(
            **inputs,
            max_new_tokens=tokens,
            do_sample=False,
            repetition_penalty=1.3,
            pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
        )
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher")
    parser.add_argument("student")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=40)
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    table = Table(title=f"“{options.prompt} …”", title_justify="left", show_lines=True)
    table.add_column("")
    table.add_column("goes on")
    for name in ("teacher", "student"):
        table.add_row(name, continuation(getattr(options, name), options.prompt, options.tokens).strip())
    Console().print(table)


if __name__ == "__main__":
    main()
