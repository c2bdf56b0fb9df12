"""The section `on_policy`: texts that the student writes itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class GeneratorsConfig:
    """Ranks that do nothing but write. Not available yet: `on_policy.writers` must be student."""

    replicas: int = 1
    """Independent generators."""

    dtype: str = "bfloat16"
    """Weights and compute of a generator."""


@dataclass
class OnPolicyConfig:
    """On-policy distillation: the student completes prompts of the data, and the teacher judges what it wrote."""

    fraction: float = 1.0
    """Share of the sequences that the student writes, 0 to 1, exact and spread evenly; 0 is a run without."""

    max_new_tokens: int = 256
    """Tokens of a completion at most; prompt and completion must fit into data.sequence_length."""

    temperature: float = 1.0
    """Of sampling; loss.temperature is another matter."""

    top_p: float = 1.0
    """Draw from the likeliest ids that together have this probability; 1: from all."""

    top_k: int = 0
    """Draw from so many of the likeliest ids; 0: from all."""

    samples: int = 1
    """Completions of each prompt."""

    every: int = 1
    """Optimizer steps whose texts are written at once: a window."""

    lag: int = 1
    """How many windows the weights that write are behind those that train. 0: write, ask, train; 1: teachers judge a
    window while the one before it is trained on."""

    prompt_tokens: int = 32
    """First tokens of a running text that are its prompt. Prompts of pairs and conversations are what is masked.
    With a fraction of 1 records may be prompts alone."""

    writers: str = "student"
    """Who writes: student, the student's own ranks between steps. generators, ranks of their own, cannot be run yet."""

    generators: GeneratorsConfig = field(default_factory=GeneratorsConfig)


def student_writes(config: Any) -> bool:
    """Return whether the student writes some of the texts of a run, given its `Config`."""
    return config.on_policy is not None and config.on_policy.fraction > 0


def student_writes_all(config: Any) -> bool:
    """Return whether nothing but prompts is used of the training texts, so that those may lack answers."""
    return config.on_policy is not None and config.on_policy.fraction == 1
