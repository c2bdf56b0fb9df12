"""Make a teacher and a student of Qwen3.5's shape with random weights, without network, for checks of a whole run.

    python scripts/make_random_pair.py OUTPUT [--small] [--device cuda]

Linear-attention layers with a full one after every three, as in Qwen3.5; its vocabulary of 248,320 (of which the
tokenizer of tests/assets uses the first 2,048). About 1.7 B and 0.4 B parameters, or with --small a few hundred
thousand. Speed, memory, traffic and equality of losses do not depend on what a model knows.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from disaggkd_cli.models.save import save_model_directory

TOKENIZER = Path(__file__).resolve().parents[1] / "tests" / "assets" / "tiny-austen"
COMMON = {"max_position_embeddings": 4096, "eos_token_id": 0, "pad_token_id": 0, "bos_token_id": None}
SIZES = {
    "teacher": {
        "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 12, "intermediate_size": 6144, "head_dim": 256,
        "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    },
    "student": {
        "vocab_size": 248320, "hidden_size": 1024, "num_hidden_layers": 8, "intermediate_size": 3072, "head_dim": 256,
        "num_attention_heads": 4, "num_key_value_heads": 1, "linear_num_key_heads": 8, "linear_num_value_heads": 8,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
SMALL = {
    "vocab_size": 2304, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16, "num_attention_heads": 4,
    "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip


def config_of(name: str, small: bool) -> Qwen3_5TextConfig:
    """Return the configuration of one of the two."""
    shape = {**SIZES[name], **(SMALL if small else {})}
    if small:
        shape["hidden_size"] = 64 if name == "teacher" else 32
    return Qwen3_5TextConfig(**COMMON, **shape)


def make(name: str, output: Path, small: bool, device: str) -> int:
    """Write one model directory and return its number of parameters."""
    torch.manual_seed(len(name))
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of(name, small), dtype=torch.bfloat16)
    if not model.config.tie_word_embeddings:
        # Logits of some three units, as of a language model; those of fresh weights are nearly all alike.
        with torch.no_grad():
            model.lm_head.weight.mul_(3.0 / (model.config.initializer_range * model.config.hidden_size**0.5))
    return save_model_directory(model, TOKENIZER, output / name)


def main() -> None:
    """Make both."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--device", default="cpu", help="where the weights are drawn")
    parser.add_argument("--config-only", action="store_true", help="write no weights: enough for `disaggkd plan`")
    options = parser.parse_args()
    for name in SIZES:
        if options.config_only:
            config_of(name, options.small).save_pretrained(options.output / name)
            continue
        began = time.monotonic()
        count = make(name, options.output, options.small, options.device)
        print(f"{options.output / name}: {count:,} parameters in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
