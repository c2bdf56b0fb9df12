"""Make the models of configs/two-cores*.yaml: random weights of a stated shape, and the tokenizer of tests/assets.

    python scripts/make_two_core_pair.py [--output assets/two-core]

The teacher has eight times the student's parameters in its layers, so that gathering it for every micro-batch shows in
a colocated run. The wide teacher has few large layers and a wide embedding: what a sharded teacher gathers whole is
then large beside the shards themselves, as it is where layers hold many experts. The deep teacher has layers enough to
be cut into stages. The weights are random (normal,
0.02): speed, memory, traffic and equality of losses do not depend on what a model knows. All vocabularies are padded
from the tokenizer's 2,048 ids to 8,192.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from disaggkd_cli.models.save import save_model_directory

TOKENIZER = Path(__file__).parents[1] / "tests" / "assets" / "tiny-austen"
COMMON = {"vocab_size": 8192, "head_dim": 64, "max_position_embeddings": 1024, "eos_token_id": 0, "pad_token_id": 0,
          "bos_token_id": None, "tie_word_embeddings": False}  # fmt: skip
SHAPES = {
    "teacher": {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
                "intermediate_size": 1536},
    "wide-teacher": {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 8,
                     "intermediate_size": 3072},
    "deep-teacher": {"hidden_size": 512, "num_hidden_layers": 16, "num_attention_heads": 8, "num_key_value_heads": 4,
                     "intermediate_size": 1536},
    "student": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
                "intermediate_size": 768},
}  # fmt: skip


def make(name: str, output: Path) -> int:
    """Write one model directory and return its number of parameters."""
    torch.manual_seed(len(name))
    model = LlamaForCausalLM(LlamaConfig(**COMMON, **SHAPES[name]))
    return save_model_directory(model, TOKENIZER, output / name)


def main() -> None:
    """Make all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("assets/two-core"))
    output = parser.parse_args().output
    for name in SHAPES:
        print(f"{output / name}: {make(name, output):,} parameters")


if __name__ == "__main__":
    main()
