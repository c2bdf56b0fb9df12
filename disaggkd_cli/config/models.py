"""The sections `teacher` and `student`: the models, and how their ranks are laid out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class TeacherConfig:
    """The model that is distilled, and how its replicas are laid out."""

    model: str = ""
    """A local model directory, a GGUF file, or a hub name. Required."""

    dtype: str = "bfloat16"
    """Weights and compute of the teacher's backbone: bfloat16, float16 or float32."""

    replicas: int = 1
    """Independent replicas of the teacher, each serving every student rank. Ignored when colocated."""

    ranks_per_replica: int = 1
    """Ranks that one replica spans."""

    parallelism: str = "auto"
    """How a replica of several ranks shares its weights: pipeline (each rank a run of layers), fsdp or tensor. auto
    takes pipeline where the model can be cut into stages, else fsdp; both give the bits of one rank."""

    cache: str | None = None
    """A directory of recorded hidden states that stands in for a live teacher."""

    attention: str = "auto"
    """Attention kernels: auto (transformers' choice), eager, sdpa, flash_attention_2 or _3 (packages of their own), or
    flex_attention. The last three need a GPU and build no [S, S] mask for packed rows."""

    trust_remote_code: bool = False
    """Let the model directory's own Python code run. Off unless you trust whoever wrote it."""


@dataclass
class FromTeacherConfig:
    """A student cut out of the teacher: its embeddings, its head, and some of its layers."""

    layers: Any = None
    """Which of the teacher's layers the student keeps: `best_20` (the 20 whose loss hurts most, found at start on the
    run's own texts and kept for resumes), `every_2` (0, 2, 4, …), or a list such as [0, 2, 5]."""


@dataclass
class LoraConfig:
    """Low-rank adapters in the student (needs peft): only they are trained."""

    rank: int = 16
    """Rank of each adapter."""

    alpha: float = 32.0
    """An adapter's change is multiplied by alpha / rank."""

    targets: Any = "all-linear"
    """Which modules get one: ends of their names, such as [q_proj, v_proj], or all-linear (never the LM head)."""

    dropout: float = 0.0
    """Dropout on an adapter's input, in training."""


@dataclass
class StudentConfig:
    """The model that is trained."""

    model: str | None = None
    """A local model directory, a GGUF file, or a hub name to start from."""

    from_teacher: FromTeacherConfig | None = None
    """Start from some of the teacher's layers instead of from `model`."""

    from_config: str | None = None
    """Start from fresh random weights: a `config.json`, a directory that holds one, or a hub name."""

    lora: LoraConfig | None = None
    """Train low-rank adapters instead of the weights; the student's start must then be a model or from_teacher."""

    ranks: int = 1
    """Ranks that the student's parameters, gradients and optimizer state are sharded over (FSDP2)."""

    dtype: str = "auto"
    """Compute dtype of forward and backward; auto is bfloat16 on GPUs and float32 on CPUs. Master weights and optimizer
    state are float32 always."""

    freeze: list[str] = field(default_factory=list)
    """Parameters that stay as they are: shell patterns over their names, such as `*embed_tokens*` or `lm_head*`."""

    activation_checkpointing: str = "none"
    """`full` keeps only the input of each layer and recomputes the rest in backward."""

    router_aux_weight: float | None = None
    """Weight of the load-balancing loss of a mixture of experts' routers, beside the loss; 0 = none. Default: the
    coefficient of the student's own configuration (`router_aux_loss_coef`)."""

    replicate: int = 1
    """Replicas of the sharded student (HSDP): ranks must be a multiple of it. Ranks of one replica are neighbours."""

    compile: bool = False
    """Compile each decoder layer with torch.compile."""

    attention: str = "auto"
    """Attention kernels: auto (transformers' choice), eager, sdpa, flash_attention_2 or _3 (packages of their own), or
    flex_attention. The last three need a GPU and build no [S, S] mask for packed rows."""

    trust_remote_code: bool = False
    """Let the model directory's own Python code run. Off unless you trust whoever wrote it."""
