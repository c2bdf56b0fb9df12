"""The fused loss in a plain PyTorch loop: two small models, no other part of disaggkd.

    python examples/plain_loop.py --steps 20

The student's and the teacher's backbones return hidden states; their heads go into the loss, which never makes the
logits of all rows.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

from disaggkd_cli.losses import Head, fused_kd_loss


class CausalModel(nn.Module):
    """A token embedding, a recurrent layer, and a head that forward leaves alone."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.mixer = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return hidden states [B, S, H] of token ids [B, S]."""
        return self.mixer(self.embedding(input_ids))[0]


def main() -> None:
    """Train the student and print its loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    vocabulary = 4096
    teacher, student = CausalModel(vocabulary, 128).eval(), CausalModel(vocabulary, 64)
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    for step in range(steps):
        tokens = torch.randint(0, vocabulary, (4, 65))
        input_ids, labels = tokens[:, :-1], tokens[:, 1:].flatten()
        with torch.no_grad():
            teacher_hidden = teacher(input_ids).flatten(0, 1)
        out = fused_kd_loss(
            student(input_ids).flatten(0, 1),
            Head(student.head.weight),
            teacher_hidden,
            Head(teacher.head.weight),
            labels,
            divergence="forward_kl",
            temperature=2.0,
            ce_weight=0.1,
            memory_budget="16MiB",
        )
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {out.loss.item():.4f} kd {out.kd.item():.4f} ce {out.ce.item():.4f}")


if __name__ == "__main__":
    main()
