"""The configuration: one dataclass per section. Field names are a contract; every field says what it does.

A config is data: it names no classes and runs no code. Values left out take the defaults here, which suit most people.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from disaggkd_cli.config.attention import ATTENTION
from disaggkd_cli.config.models import StudentConfig, TeacherConfig
from disaggkd_cli.config.on_policy import OnPolicyConfig
from disaggkd_cli.config.source_names import DATA_FORMATS
from disaggkd_cli.config.texts import DataConfig
from disaggkd_cli.layouts import AUTO, PARALLELISMS
from disaggkd_cli.losses.divergences import DIVERGENCES
from disaggkd_cli.losses.hidden_names import HIDDEN_LOSSES
from disaggkd_cli.wire import FORMATS

CHOICES: dict[str, tuple[str, ...]] = {
    "mode": ("disaggregated", "colocated"),
    "teacher.dtype": ("bfloat16", "float16", "float32"),
    "teacher.parallelism": (AUTO, *PARALLELISMS),
    "teacher.attention": ATTENTION,
    "student.dtype": ("auto", "float32", "bfloat16"),
    "student.attention": ATTENTION,
    "student.activation_checkpointing": ("none", "full"),
    "loss.divergence": DIVERGENCES,
    "loss.hidden_loss": HIDDEN_LOSSES,
    "loss.implementation": ("fused", "full"),
    "data.format": DATA_FORMATS,
    "data.packing": ("auto", "on", "off"),
    "data.long_documents": ("auto", "split", "drop", "error"),
    "data.records": ("auto", "text", "prompt_completion", "messages", "sharegpt", "alpaca"),
    "data.text_documents": ("file", "sections"),
    "train.schedule": ("cosine", "linear", "constant"),
    "train.on_save_error": ("stop", "warn"),
    "transport.dtype": tuple(FORMATS),
    "transport.backend": ("auto", "gloo", "nccl"),
    "launch.device": ("auto", "cpu", "cuda"),
    "launch.secret": ("auto", "none"),
    "on_policy.writers": ("student", "generators"),
    "on_policy.generators.dtype": ("bfloat16", "float16", "float32"),
    "export.dtype": ("bfloat16", "float16", "float32"),
}
"""The keys that take one of a few words, and the words."""


@dataclass
class LossConfig:
    """What is minimised: kd_weight · temperature² · divergence(teacher, student) + ce_weight · cross-entropy, and
    hidden_weight · distance of the hidden states where that is wanted."""

    divergence: str = "forward_kl"
    """How far the student is from the teacher; docs/loss.md defines each."""

    temperature: float = 1.0
    """Softens both distributions in the divergence; cross-entropy stays at temperature 1."""

    beta: float = 0.5
    """The mixing weight of the divergences that have one, from 0 to 1."""

    kd_weight: float = 1.0
    """Weight of the divergence."""

    ce_weight: float = 0.0
    """Weight of cross-entropy with the data's own next tokens."""

    hidden_weight: float = 0.0
    """Weight of a loss on the final hidden states: the student's, through a learned projection to the teacher's width
    that is not exported, against the teacher's."""

    hidden_loss: str | None = None
    """How far they are apart: `cosine` (null means it too) or `mse`, the mean squared difference of a row. Only with
    hidden_weight above 0."""

    implementation: str = "fused"
    """`fused` never forms tokens × vocabulary logits; `full` does, for comparison."""

    memory_budget: str = "auto"
    """Scratch memory that the fused loss may use per rank, such as 256MiB. auto is 256 MiB on CPUs, and on GPUs an
    eighth of what the student's weights and optimizer leave, 256 MiB to 4 GiB."""

    vocabulary_parallel: Any = False
    """true keeps one shard of both heads on each rank of a replica of the student and gathers hidden rows instead;
    false gathers the student's head; auto takes whichever sends fewer bytes."""


@dataclass
class TrainConfig:
    """The optimisation."""

    steps: int = 100
    """Optimizer steps."""

    micro_batch_sequences: int = 4
    """Sequences in one forward pass of one rank."""

    accumulation: int = 1
    """Micro-batches that one optimizer step adds up on each rank."""

    learning_rate: float = 5.0e-5
    """Peak learning rate of AdamW."""

    warmup_steps: int = 10
    """Steps over which the learning rate rises linearly from zero."""

    schedule: str = "cosine"
    """What follows the warm-up: cosine or linear decay to zero, or constant."""

    weight_decay: float = 0.0
    """AdamW's decoupled weight decay; not applied to vectors (norms, biases)."""

    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 turns clipping off."""

    eval_every: int = 50
    """Evaluate each so many steps; 0 evaluates only before and after."""

    save_every: int = 50
    """Write a checkpoint each so many steps; 0 writes one only at the end."""

    keep_checkpoints: int = 2
    """How many of the newest checkpoints stay on disk."""

    save_timeout: float = 1800.0
    """Seconds without any progress after which the writing of a checkpoint counts as hung, and the run ends."""

    on_save_error: str = "stop"
    """A checkpoint that cannot be written: stop the run, or warn and go on with the previous one."""

    stop_at: int | None = None
    """Save and stop after this step as if interrupted (exit code 75); schedules still aim at `steps`."""

    adam_betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """AdamW's decay rates of the first and second moment."""


@dataclass
class TransportConfig:
    """How hidden states travel from teachers to student ranks."""

    ring_depth: int = 3
    """Micro-batches that may be on the way or waiting, per student rank. 1 means no overlap."""

    dtype: str = "bfloat16"
    """Format on the wire: bfloat16, float16, float32, or float8 with a scale per row."""

    backend: str = "auto"
    """auto takes nccl between GPUs and gloo otherwise."""

    mixed_teachers: bool = False
    """Let teachers of the same weights serve that compute other bits than the first one (another dtype, attention
    kernel, layout, number of threads, version): the run is then not reproducible bit for bit. Else they are refused."""

    links_per_rank: int = 4
    """Where there are twice as many teachers or more, a student rank links to 4 to 8 of them instead of to all."""

    timeout: float = 60.0
    """Seconds that one transfer, or one answer of a teacher, may take before its link is given up."""

    teacher_wait: float = 300.0
    """Seconds that a student waits for a teacher when there is none, before it saves and stops (exit code 75)."""

    checksum: bool = True
    """Check each payload's CRC-32 on links that run over gloo."""


@dataclass
class LaunchConfig:
    """Processes, cores and addresses."""

    rendezvous: str | None = None
    """`host:port` where separately started teachers and students meet; student rank 0 listens there."""

    threads: Any = "auto"
    """CPU threads per rank; auto shares this machine's cores out among its ranks."""

    bind: str = "loopback"
    """Where listeners bind to: `loopback`, `all`, or the name (such as ib0) or an address of an interface here."""

    device: str = "auto"
    """auto takes a GPU where there is one; cpu or cuda insist."""

    secret: str = "auto"
    """auto: student and teachers prove to each other that they know the run's secret. none: whoever reaches the
    rendezvous is believed, and can change the weights."""

    secret_file: str | None = None
    """The file with the secret (mode 0600). null: `run_dir/secret`, which the student makes; teachers that do not see
    that directory need a copy of the file."""


@dataclass
class ExportConfig:
    """The finished student as a Hugging Face model directory, with a model card written from the run."""

    dtype: str = "bfloat16"
    """Of its weights: bfloat16, float16 or float32. Master weights stay in the checkpoints, in float32."""

    push_to_hub: str | None = None
    """A repository of the model hub, such as me/my-student, to upload the directory to when the run is done."""

    private: bool = True
    """Whether a repository that `push_to_hub` makes is private."""


@dataclass
class LogConfig:
    """Where figures go besides `run_dir/metrics.jsonl`. A resumed run goes on with its own run at each tracker."""

    tensorboard: bool = True
    """TensorBoard event files in `run_dir/tensorboard`, where tensorboard is installed."""

    wandb: str | None = None
    """A project of Weights & Biases; needs the extra wandb."""

    mlflow: str | None = None
    """An experiment of MLflow, on the server that MLFLOW_TRACKING_URI names; needs the extra mlflow."""

    trackio: str | None = None
    """A project of Trackio; needs the extra trackio."""

    samples: int = 2
    """How many held-out texts' beginnings teacher and student go on with, greedily, at each evaluation: in the log, in
    `run_dir/samples.jsonl`, in TensorBoard and in the report. 0: none."""

    sample_prompts: list[str] = field(default_factory=list)
    """Prompts of your own instead, as the tokenizer takes them (nothing is added, no chat template)."""

    sample_tokens: int = 24
    """Tokens that each writes at most, and half of `data.sequence_length` at most. The teacher writes once a run: so
    many small requests, one after the other."""

    timeline: bool = False
    """Record when each rank asked, computed and waited, a line a piece of work in `run_dir/logs/*.timeline.jsonl`;
    `scripts/overlap_picture.py` draws it."""


@dataclass
class HardwareConfig:
    """What `plan` assumes; a run itself ignores it."""

    gpu: str = "H100-SXM"
    """A name of the hardware catalogue."""

    gpus_per_node: int | None = None
    """GPUs in one node; null: as in the machine that the GPU usually comes in (the catalogue's)."""

    nic_gbps: float | None = None
    """Network rate per GPU in Gbit/s; null: the catalogue's for the GPU; 0: no network, all runs on one node."""

    teacher_gpu: str | None = None
    """GPU of the teacher's nodes, when it differs from the student's."""

    supervised_share: Any = "auto"
    """Share of the tokens that are trained on, 0 to 1; auto looks at the first records of local `data.train`, and takes
    1 where it cannot tell. Only rows of such tokens travel."""

    catalogue: str | None = None
    """A YAML file of your own that adds to or overrides the shipped hardware catalogue."""

    calibration: str | None = None
    """A YAML file written by `plan --calibrate`, with efficiencies measured on your own hardware."""

    gpu_hour_price: float | None = None
    """Price of one hour of `hardware.gpu`, in any currency; the plan then shows cost and decides by it. null: the
    catalogue's, if it has one."""

    teacher_gpu_hour_price: float | None = None
    """Price of one hour of `hardware.teacher_gpu`; null: as `hardware.gpu_hour_price` where both are one kind, else the
    catalogue's."""


@dataclass
class Config:
    """One run."""

    mode: str = "disaggregated"
    """disaggregated: teachers on ranks of their own; colocated: teacher and student share the student's ranks."""

    seed: int = 42
    """Decides data order, held-out documents and fresh weights."""

    run_dir: str = "runs/default"
    """Everything that the run leaves goes here."""

    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    student: StudentConfig = field(default_factory=StudentConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    on_policy: OnPolicyConfig | None = None
    export: ExportConfig = field(default_factory=ExportConfig)
    log: LogConfig = field(default_factory=LogConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)

    @property
    def global_batch_sequences(self) -> int:
        """Sequences in one optimizer step, over all ranks."""
        return self.student.ranks * self.train.micro_batch_sequences * self.train.accumulation

    @property
    def teacher_ranks(self) -> int:
        """Ranks that serve the teacher and nothing else."""
        if self.mode == "colocated" or self.teacher.cache:
            return 0
        return self.teacher.replicas * self.teacher.ranks_per_replica
