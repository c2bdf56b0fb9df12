"""What it takes that the student writes its own texts (`on_policy`): the weights, the tokens, and the window's barrier.

All times are of the student's ranks, which write between steps. Each completion is taken to be as long as it may be.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from disaggkd_cli.planner.constants import constant
from disaggkd_cli.planner.efficiency import KERNELS
from disaggkd_cli.planner.memory.writing import is_copied, kept_by_layer
from disaggkd_cli.planner.models.shapes import ExpertMLP
from disaggkd_cli.planner.network import collective_rate
from disaggkd_cli.planner.terms import Term, term
from disaggkd_cli.planner.workload import Workload

WRITING = "writing"


@dataclass(frozen=True)
class WritingTimes:
    """Of one window.

    Attributes:
        token: seconds in which a batch gets one token more.
        weights: seconds until each rank has the weights; `weights_bytes`: that each receives.
        written: seconds in which the ranks write.
        window: seconds from one window to the next, training included.
        lag_saves: seconds that a window would be longer with lag 0; 0 where it is 0.
        tokens: written in a window, over all ranks.
        steps: of a window.
    """

    token: Term
    weights: Term
    weights_bytes: Term
    written: Term
    window: Term
    lag_saves: float
    tokens: float
    steps: int

    @property
    def share(self) -> float:
        """Share of a window in which the ranks gather weights and write."""
        return (self.weights.value + self.written.value) / self.window.value

    @property
    def figures(self) -> tuple[Term, ...]:
        """Its terms."""
        return self.token, self.weights_bytes, self.weights, self.written, self.window


def writing_times(work: Workload, *, train: float, stalled: float, latency: float, ring: bool) -> WritingTimes:
    """Return the times of a window.

    Args:
        train: seconds of one micro-batch on a rank whose hidden states are there.
        stalled: seconds of one where they come as fast as teachers, links and ring let them.
        latency: seconds from a request to its hidden states.
        ring: whether teachers work while the student writes; colocated ones do not.
    """
    section = work.writing
    batches = _batches(work)
    token = token_time(work)
    sent = term(
        "weights that a rank receives for a window",
        "b * N * (W - 1) / W",
        "all-gathers of the whole student, cast before they travel",
        b=work.student_bytes, N=work.student_parameters.total, W=work.shard_ranks,
    )  # fmt: skip
    weights = term(
        "gathering the weights of a window",
        "bytes / B + copied * b * N / M",
        "the all-gathers, and writing the copy",
        bytes=sent.value,
        B=collective_rate(work.cluster, work.shard_ranks, work.cluster.student_gpu) * 1e9,
        copied=int(is_copied(work)),
        b=work.student_bytes,
        N=work.student_parameters.total,
        M=_memory_rate(work),
    )
    written = term(
        "writing a window",
        "batches * (2 * N_act * B * P / C + T * token)",
        "batches of one rank, one after the other: the prompts, then token by token to the longest",
        batches=batches,
        N_act=work.student_parameters.active_layers,
        B=work.writing_batch,
        P=section.prompt_tokens,
        C=_compute_rate(work),
        T=section.new_tokens,
        token=token.value,
    )
    values = {
        "weights": weights.value, "written": written.value, "D": section.every * work.accumulation, "s": train,
        "t": stalled, "l": latency, "K": work.ring_depth,
    }  # fmt: skip
    barrier = "weights + written + l + D * t"
    ahead = "weights + written + max(D * s, D * t - min(weights + written, K * t))"
    if not ring:
        barrier = ahead = "weights + written + D * t"
    source = (
        "nothing can be asked before it is written, so the ring is empty when the first micro-batch is due"
        if section.lag == 0
        else "the ring fills while the student writes, and never runs empty for the window's sake"
    )
    window = term("a window of steps", barrier if section.lag == 0 else ahead, source, **values)
    without = term("a window of steps without a lag", barrier, source, **values)
    return WritingTimes(
        token, weights, sent, written, window, without.value - window.value,
        tokens=float(_sequences(work) * section.new_tokens), steps=section.every,
    )  # fmt: skip


def token_time(work: Workload) -> Term:
    """Seconds in which a batch of one rank gets one token more: reading weights and cache, or what else is slower."""
    section, student = work.writing, work.student
    length = section.prompt_tokens + section.new_tokens / 2
    return term(
        "one token more for a batch",
        "max((b * N_read + B * cache) / M, 2 * N_act * B / C, L * o)",
        "weights are read once for all rows, the cache of each at half its way; matrix products; and, where those are "
        "short, transformers' own time between kernels",
        b=work.student_bytes,
        N_read=_parameters_read(work),
        B=work.writing_batch,
        cache=sum(kept_by_layer(layer, length, work.student_bytes) for layer in student.layers),
        M=_memory_rate(work),
        N_act=work.student_parameters.active_layers + student.vocabulary * student.hidden,
        C=_compute_rate(work),
        L=len(student.layers),
        o=constant("decode_layer_seconds"),
    )


def _sequences(work: Workload) -> Fraction:
    section = work.writing
    every = section.every * work.accumulation * work.student_ranks * work.writing_batch
    return Fraction(str(section.fraction)) * every


def _batches(work: Workload) -> int:
    """Batches of the busiest rank in a window."""
    batches = -(-_sequences(work) // work.writing_batch)
    return int(-(-batches // work.student_ranks))


def _parameters_read(work: Workload) -> float:
    """Parameters that a forward of one token a row reads: of routed experts those that any row is sent to."""
    counted, student = work.student_parameters, work.student
    read = float(counted.total - (counted.embedding if counted.head else 0))
    for layer in student.layers:
        mlp = layer.mlp
        if isinstance(mlp, ExpertMLP):
            unread = (1 - mlp.top_k / mlp.experts) ** work.writing_batch
            read -= unread * mlp.experts * 3 * student.hidden * mlp.width
    return read


def _memory_rate(work: Workload) -> float:
    return work.cluster.student_gpu.hbm_tb_per_s * 1e12 * constant("hbm_efficiency")


def _compute_rate(work: Workload) -> float:
    gpu = work.cluster.student_gpu
    slower = constant("float32_slowdown") if work.student_bytes == 4 else 1.0
    return gpu.matmul_tflops * 1e12 * KERNELS.of(gpu.architecture).matmul / slower
