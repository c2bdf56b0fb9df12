"""What is planned, in the planner's own terms: models, parallelism, batch, loss, transport, hardware. No config, no
files."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from disaggkd_cli.config.by_device import automatic_budget
from disaggkd_cli.config.links import links_of_ranks
from disaggkd_cli.layouts import EACH_RANK_SERVES, Layout, TeacherFacts, why_not
from disaggkd_cli.losses.placement import HeadTraffic
from disaggkd_cli.planner.constants import constant
from disaggkd_cli.planner.hardware import Gpu
from disaggkd_cli.planner.models.parameters import Parameters, count_parameters
from disaggkd_cli.planner.models.quantised import Quantised
from disaggkd_cli.planner.models.shapes import ExpertMLP, GatedDeltaNet, ModelShape

MODES = ("colocated_full", "colocated_fused", "disaggregated_fused")


@dataclass(frozen=True)
class Cluster:
    """Where it runs. `nic_gb_per_s` is one direction, per GPU; 0: there is no network, all runs on one node.

    `student_price`, `teacher_price`: of one GPU-hour of each kind; None: unknown.
    """

    student_gpu: Gpu
    teacher_gpu: Gpu
    gpus_per_node: int
    nic_gb_per_s: float
    device: str = "cuda"
    student_price: float | None = None
    teacher_price: float | None = None
    price_source: str = ""


@dataclass(frozen=True)
class Efficiency:
    """What a calibration found: measured times over those of the closed form, and memory overheads. Without one (no
    `calibrated_from`) times are as published runs of others had them."""

    teacher: float = 1.0
    student: float = 1.0
    reserve: float = field(default_factory=lambda: constant("reserve"))
    fixed_gib: float = 0.0
    jitter: float = field(default_factory=lambda: constant("jitter"))
    calibrated_from: str | None = None


@dataclass(frozen=True)
class Writing:
    """Texts that the student writes itself (`on_policy`).

    Attributes:
        fraction: share of the sequences that are.
        new_tokens: of a completion, at most; prompt_tokens: of its prompt, at most.
        every: optimizer steps of a window; lag: windows that it is written ahead.
    """

    fraction: float
    new_tokens: int
    prompt_tokens: int
    every: int
    lag: int


@dataclass(frozen=True)
class Workload:
    """One distillation run to be planned. Tokens T are those of one micro-batch on one student rank.

    Attributes:
        teacher_bytes, student_bytes: bytes an element of weights and compute (the student's masters are float32).
        trained: trained share of the student's parameters; `layer_trained`: of its largest layer's; `head_trained`,
            `root_trained`: whether its head, or anything outside of the layers, is among them.
        micro_batch_tokens: T; sequence: S; accumulation: micro-batches of one step; steps: of the whole run.
        supervised: share of the tokens whose rows travel and are trained on.
        quantised: how a teacher's own ranks hold its matrices; None: as `teacher_bytes`. Colocated ones shard them,
            which takes the plain form.
        teacher_attention, student_attention: `auto` or the kernels that the config asks for.
        packed: rows hold several documents.
        checkpointing: full activation checkpointing of the student's layers.
        delta_kernel: `fla` or `torch`.
        links_per_rank: `transport.links_per_rank`; `nccl_links`: each link has a NCCL communicator.
        vocabulary_parallel: true, false, or auto (see `losses.placement`), as `loss.vocabulary_parallel`.
        teacher_facts: what of the teacher's config.json decides how it may be laid out; None: anything goes.
        cached: hidden states come from a directory, so there are no teacher ranks.
        compiled: the student's layers run under `torch.compile`.
        router_loss: the load-balancing loss of the student's routers is trained on.
        hidden_loss: the kind of loss that the hidden states have of their own, with a projection; None: none.
        writing: what the student writes itself; None: nothing.
    """

    teacher: ModelShape
    student: ModelShape
    cluster: Cluster
    efficiency: Efficiency
    teacher_bytes: int = 2
    student_bytes: int = 2
    student_ranks: int = 8
    replicate: int = 1
    replicas: int = 1
    ranks_per_replica: int = 1
    parallelism: str = "fsdp"
    trained: float = 1.0
    layer_trained: float = 1.0
    head_trained: bool = True
    root_trained: bool = True
    micro_batch_tokens: int = 8192
    sequence: int = 4096
    accumulation: int = 1
    steps: int = 100
    supervised: float = 1.0
    packed: bool = False
    checkpointing: bool = False
    divergence: str = "forward_kl"
    temperature: float = 1.0
    implementation: str = "fused"
    asked_budget: int | None = 256 << 20
    vocabulary_parallel: bool | str = False
    ring_depth: int = 3
    wire_bytes: float = 2.0
    links_per_rank: int = 4
    nccl_links: bool = True
    delta_kernel: str = "fla"
    cached: bool = False
    quantised: Quantised | None = None
    teacher_attention: str = "auto"
    student_attention: str = "auto"
    compiled: bool = False
    router_loss: bool = False
    hidden_loss: str | None = None
    optimizer_bytes: int = 8
    writing: Writing | None = None

    teacher_facts: TeacherFacts | None = None

    @property
    def layout(self) -> Layout:
        """How a replica's ranks share the teacher."""
        return Layout(self.parallelism, self.ranks_per_replica)

    @property
    def refused(self) -> str | None:
        """Why a run would refuse to lay the teacher out so; None where it would not (or has no live teacher)."""
        if self.teacher_facts is None or self.cached:
            return None
        return why_not(self.layout, self.teacher_facts)

    @cached_property
    def teacher_parameters(self) -> Parameters:
        return count_parameters(self.teacher)

    @cached_property
    def student_parameters(self) -> Parameters:
        return count_parameters(self.student)

    @property
    def shard_ranks(self) -> int:
        """Ranks that one replica of the student is sharded over."""
        return self.student_ranks // self.replicate

    @property
    def memory_budget(self) -> int:
        """Scratch of the loss on a student rank, as a run settles it."""
        if self.asked_budget is not None:
            return self.asked_budget
        parameters, memory = self.student_parameters.total, int(self.cluster.student_gpu.memory_bytes)
        return automatic_budget(
            self.cluster.device, memory, parameters, round(parameters * self.trained), self.shard_ranks
        )

    @property
    def vocabulary_shards(self) -> int:
        """Ranks that share both heads; 1 where each gathers the student's and keeps the teacher's whole."""
        wanted = self.vocabulary_parallel
        if wanted == "auto":
            wanted = self.head_traffic.rows_should_travel
        return self.shard_ranks if wanted else 1

    @property
    def head_traffic(self) -> HeadTraffic:
        """What travels when the ranks of one replica share the heads, and when they do not."""
        return HeadTraffic(
            ranks=self.shard_ranks,
            rows=self.rows,
            tokens=self.micro_batch_tokens,
            vocabulary=self.student.vocabulary,
            student_width=self.student.hidden,
            teacher_width=self.teacher.hidden,
            student_bytes=self.student_bytes,
            teacher_bytes=self.teacher_bytes,
            tied=self.student.tied,
            head_trained=self.head_trained,
        )

    @property
    def teacher_ranks(self) -> int:
        return 0 if self.cached else self.replicas * self.ranks_per_replica

    @property
    def links(self) -> tuple[int, int]:
        """The most links that a student rank and a teacher rank keep."""
        each = self.ranks_per_replica if self.parallelism in EACH_RANK_SERVES else 1
        return links_of_ranks(self.replicas * each, self.student_ranks, self.links_per_rank)

    @property
    def rows(self) -> int:
        """Supervised rows of one micro-batch on one rank."""
        return max(1, round(self.micro_batch_tokens * self.supervised))

    @property
    def writing_batch(self) -> int:
        """Prompts that a rank completes at once: as many as a micro-batch has sequences."""
        return max(1, self.micro_batch_tokens // self.sequence)

    @property
    def step_tokens(self) -> int:
        """Tokens of one optimizer step, over all student ranks."""
        return self.student_ranks * self.micro_batch_tokens * self.accumulation

    def with_(self, **changes: object) -> Workload:
        """A copy with some fields changed."""
        return replace(self, **changes)


def is_sparse(shape: ModelShape) -> bool:
    """Whether it has mixture-of-experts layers."""
    return any(isinstance(layer.mlp, ExpertMLP) for layer in shape.layer_kinds())


def is_hybrid(shape: ModelShape) -> bool:
    """Whether it has delta-net layers."""
    return any(isinstance(layer.mixer, GatedDeltaNet) for layer in shape.layer_kinds())
