"""Train the small model that the process tests use as their teacher: about a million parameters, on the six novels.

    python scripts/fetch_assets.py
    python scripts/train_tiny_teacher.py assets/austen tests/assets/tiny-austen

It makes a byte-level BPE tokenizer of 2,048 tokens and a Llama of 4 layers from the same texts, trains it with plain
PyTorch, and writes both as a Hugging Face directory in bfloat16 (about 2.5 MB).
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from disaggkd_cli.models.save import save_model_directory

VOCABULARY = 2048
SEQUENCE_LENGTH = 192
BATCH = 24


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")


def new_model(end_id: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end_id,
        pad_token_id=end_id,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, help="directory of .txt files")
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    options = parser.parse_args()
    torch.manual_seed(0)
    texts = [path.read_text(encoding="utf-8") for path in sorted(options.texts.glob("*.txt"))]
    if not texts:
        raise SystemExit(f"{options.texts} holds no .txt files; run scripts/fetch_assets.py first")
    tokenizer = train_tokenizer(texts)
    tokens = torch.cat([torch.tensor(tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]) for text in texts])
    print(f"{tokens.numel():,} tokens of {len(texts)} texts")
    model = new_model(tokenizer.eos_token_id)
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / 50) * (0.5 + 0.5 * math.cos(math.pi * min(1.0, step / options.steps))),
    )
    started = time.monotonic()
    for step in range(options.steps):
        starts = torch.randint(0, tokens.numel() - SEQUENCE_LENGTH, (BATCH,))
        batch = torch.stack([tokens[start : start + SEQUENCE_LENGTH] for start in starts])
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if step % 20 == 0 or step == options.steps - 1:
            seconds = time.monotonic() - started
            print(f"step {step + 1}/{options.steps}  loss {loss.item():.3f}  {seconds:.0f} s", flush=True)
    save_model_directory(model.to(torch.bfloat16), tokenizer, options.output)


if __name__ == "__main__":
    main()
