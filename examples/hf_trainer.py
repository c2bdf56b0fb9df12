"""The fused loss in a Hugging Face Trainer: a colocated teacher, and a student whose head the loss calls.

    python examples/hf_trainer.py --steps 10 --output-dir /tmp/distilled

Two small random models stand in for real ones; put `AutoModelForCausalLM.from_pretrained(...)` in their place. The
number of supervised rows comes from the Trainer, so that accumulation gives the loss of the whole batch. One device:
DDP and FSDP hook the forward of the wrapped model, so there the loss belongs inside that forward.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from disaggkd_cli.losses import Head, fused_kd_loss


class DistillationTrainer(Trainer):
    """A Trainer whose loss compares the student with a frozen teacher."""

    def __init__(self, *args, teacher: nn.Module, temperature: float = 1.0, ce_weight: float = 0.0, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.teacher = teacher.eval().requires_grad_(False).to(self.args.device)
        self.temperature, self.ce_weight = temperature, ce_weight
        # The loss divides by the number of rows itself, so the Trainer must not divide by the accumulation steps again.
        self.model_accepts_loss_kwargs = True

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the loss of one micro-batch; see Trainer."""
        student = self.accelerator.unwrap_model(model)
        input_ids = inputs["input_ids"]
        # The label of a row is the token after it; the last row of each sequence has none.
        labels = nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100).flatten()
        with torch.no_grad():
            teacher_hidden = self.teacher.model(input_ids).last_hidden_state.flatten(0, 1)
        student_hidden = student.model(input_ids).last_hidden_state.flatten(0, 1)
        out = fused_kd_loss(
            student_hidden, Head(student.lm_head.weight), teacher_hidden, Head(self.teacher.lm_head.weight), labels,
            temperature=self.temperature, ce_weight=self.ce_weight, num_tokens=num_items_in_batch,
        )  # fmt: skip
        return (out.loss, {"kd": out.kd, "ce": out.ce}) if return_outputs else out.loss


class RandomTokens(Dataset):
    """Sequences of random tokens whose first quarter is a prompt that does not count."""

    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        self.tokens = torch.randint(0, vocabulary, (count, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.tokens[index].clone()
        labels[: len(labels) // 4] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


def small_model(width: int) -> LlamaForCausalLM:
    """Return a random model of two layers."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
        )  # fmt: skip
    )


def main() -> None:
    """Train and print the log's losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--output-dir", default="distilled")
    options = parser.parse_args()
    torch.manual_seed(0)
    trainer = DistillationTrainer(
        model=small_model(32),
        teacher=small_model(64),
        ce_weight=0.1,
        temperature=2.0,
        args=TrainingArguments(
            output_dir=options.output_dir,
            max_steps=options.steps,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        ),  # fmt: skip
        train_dataset=RandomTokens(64, 32, 512),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print("losses", " ".join(f"{float(loss):.4f}" for loss in losses))


if __name__ == "__main__":
    main()
