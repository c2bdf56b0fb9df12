"""`disaggkd bench loss`: time, scratch and gradient error of the loss, beside full logits, bare products and peers.

All implementations take turns in one run and the best turn of each counts, since other work on a machine only ever
slows a turn down. Time is forward and backward. Peak is the most that torch's allocator held beyond the inputs; scratch
is that without the gradients (the fused loss holds that of the head in float32 until the backward pass is over). Errors
are relative norms of the head's gradient against full logits in float64, over `error_rows` rows and at most
`error_vocabulary` ids. Full logits and peers for which the memory does not suffice are listed with that reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from disaggkd_cli.bench.peak import peak_extra_bytes
from disaggkd_cli.bench.peers_loss import PEERS, Peer
from disaggkd_cli.errors import UserError
from disaggkd_cli.losses import DIVERGENCES, Head, fused_kd_loss, reference_kd_loss
from disaggkd_cli.terminal import console as terminal_console
from disaggkd_cli.units import format_bytes, parse_bytes

FLOOR_TILES = {
    "cpu": ((1024, 512), (1024, 1024), (512, 1024), (2048, 2048)),
    "cuda": ((2048, 8192), (4096, 16384), (8192, 16384), (8192, 65536)),
}
HEADS = {
    "reference": {
        "rows": 8192, "vocabulary": 248320, "student_width": 4096, "teacher_width": 2048, "dtypes": ("bfloat16",),
        "budgets": ("4GiB", "1GiB", "256MiB"),
    },
}  # fmt: skip
"""Ready shapes by name; `reference` is the heads of Qwen3.5-9B (student) and Qwen3.5-35B-A3B (teacher)."""
NEAR_DISTANCE = 0.04
"""Noise on the hidden states of a student that has nearly converged, KL of about 0.008."""


@dataclass(frozen=True)
class LossBenchOptions:
    """What to measure; defaults are the shape that the documentation quotes.

    Attributes:
        rows, vocabulary, student_width, teacher_width: size of the loss.
        divergences, dtypes: each dtype is measured with each divergence; full logits and peers with the first only.
        budgets: memory budgets of the fused loss.
        repeats: turns of each implementation.
        error_rows, error_vocabulary: rows, and the most ids, of the comparison with float64.
        peers: measure other projects' losses, where installed.
        device: `cpu`, `cuda`, or `auto`.
        seed: of the random inputs.
    """

    rows: int = 2048
    vocabulary: int = 32768
    student_width: int = 512
    teacher_width: int = 1024
    divergences: tuple[str, ...] = ("forward_kl",)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    budgets: tuple[str, ...] = ("256MiB", "64MiB", "8MiB")
    repeats: int = 3
    error_rows: int = 256
    error_vocabulary: int = 65536
    peers: bool = True
    device: str = "auto"
    seed: int = 0


@dataclass
class LossBenchRow:
    """One line of the table.

    Attributes:
        implementation: `gemm_floor`, `full`, `fused`, or a peer's name.
        budget: of the fused loss, else empty.
        seconds: best turn of forward and backward.
        scratch_bytes: peak_bytes without the gradients; None for the floor.
        peak_bytes: None for the floor.
        gradient_error: None for the floor, which computes no loss.
        gradient_error_near: the same where student and teacher nearly agree.
    """

    implementation: str
    divergence: str
    dtype: str
    budget: str = ""
    seconds: float = float("inf")
    scratch_bytes: int | None = None
    peak_bytes: int | None = None
    gradient_error: float | None = None
    gradient_error_near: float | None = None


@dataclass(frozen=True)
class Inputs:
    """Hidden states [R, H], head weights [V, H] and labels [R]; the student's require gradients."""

    student_hidden: Tensor
    student_weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    labels: Tensor

    def to(self, dtype: torch.dtype, rows: int | None = None, vocabulary: int | None = None) -> Inputs:
        """Return fresh leaves of the first `rows` rows and the first `vocabulary` ids in `dtype`."""
        student_hidden, teacher_hidden = self.student_hidden[:rows].detach(), self.teacher_hidden[:rows]
        student_weight = self.student_weight[:vocabulary].detach()
        return Inputs(
            student_hidden.to(dtype, copy=True).requires_grad_(),
            student_weight.to(dtype, copy=True).requires_grad_(),
            teacher_hidden.to(dtype),
            self.teacher_weight[:vocabulary].to(dtype),
            self.labels[:rows].clamp(max=len(student_weight) - 1),
        )

    def clear(self) -> None:
        """Drop the gradients."""
        self.student_hidden.grad = self.student_weight.grad = None


@dataclass
class _Entry:
    row: LossBenchRow
    loss: Callable[[Inputs], Tensor | None]
    exact_scale: bool = True
    inputs: Inputs | None = field(default=None, repr=False)


def run(options: LossBenchOptions) -> dict:
    """Measure everything and return `{"rows": [...], "absent": [...], "machine": {...}, "options": {...}}`.

    Raises:
        UserError: an unknown divergence, dtype or device.
    """
    device = _device(options.device)
    for name in options.divergences:
        if name not in DIVERGENCES:
            raise UserError(f"divergence {name!r} is unknown; it is one of {', '.join(DIVERGENCES)}")
    for name in options.dtypes:
        if name not in ("float32", "bfloat16", "float16"):
            raise UserError(f"dtype {name!r} can't be measured; it is one of float32, bfloat16, float16")
    draw = torch.Generator(device).manual_seed(options.seed)
    base = _random_inputs(options, draw, device)
    near = _near_inputs(options, draw, device)
    entries, absent = _entries(options, device)
    for dtype_name in options.dtypes:
        inputs = base.to(getattr(torch, dtype_name))
        for entry in entries:
            if entry.row.dtype == dtype_name:
                entry.inputs = inputs
    entries = _warmed_up(entries, absent, options, base, near, device)
    for _ in range(options.repeats):
        for entry in entries:
            entry.row.seconds = min(entry.row.seconds, _turn(entry, device))
    return {
        "rows": [asdict(entry.row) for entry in entries],
        "absent": absent,
        "machine": {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        },
        "options": asdict(options),
    }


_SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}


def print_table(result: dict) -> None:
    """Print the result of `run` as one table, times beside the floor and full logits of the same dtype."""
    from rich.table import Table

    table = Table(title=f"loss, forward + backward, {result['machine']['device']}", padding=(0, 0, 0, 1))
    for column in ("what", "divergence"):
        table.add_column(column)
    for column in ("seconds", "x floor", "x full", "scratch", "error", "near"):
        table.add_column(column, justify="right", no_wrap=True)
    seconds = {(row["implementation"], row["dtype"]): row["seconds"] for row in result["rows"]}
    for row in result["rows"]:
        ratios = [
            f"{row['seconds'] / seconds[name, row['dtype']]:.2f}" if (name, row["dtype"]) in seconds else ""
            for name in ("gemm_floor", "full")
        ]
        scratch = "" if row["scratch_bytes"] is None else format_bytes(row["scratch_bytes"])
        errors = ["" if row[key] is None else f"{row[key]:.1e}" for key in ("gradient_error", "gradient_error_near")]
        what = f"{row['implementation']} {row['budget']} {_SHORT_DTYPES.get(row['dtype'], row['dtype'])}"
        table.add_row(" ".join(what.split()), row["divergence"], f"{row['seconds']:.3f}", *ratios, scratch, *errors)
    console = terminal_console()
    console.print(table)
    console.print(
        "error: of the gradients against float64, relative; near: the same where student and teacher nearly agree. "
        "Scratch: peak memory beside the gradients (in their own dtype).",
        highlight=False,
    )
    for peer in result["absent"]:
        console.print(f"{peer['implementation']} ({peer['dtype']}): {peer['reason']}")


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda") or (name == "cuda" and not torch.cuda.is_available()):
        raise UserError(f"device {name!r} is not here; use cpu, cuda or auto")
    return torch.device(name)


def _random_inputs(options: LossBenchOptions, draw: torch.Generator, device: torch.device) -> Inputs:
    def normal(rows: int, width: int, size: float) -> Tensor:
        return torch.randn(rows, width, generator=draw, device=device) * size

    # Logits of some three units, as of a language model.
    return Inputs(
        normal(options.rows, options.student_width, 1.0),
        normal(options.vocabulary, options.student_width, 3 * options.student_width**-0.5),
        normal(options.rows, options.teacher_width, 1.0),
        normal(options.vocabulary, options.teacher_width, 3 * options.teacher_width**-0.5),
        torch.randint(0, options.vocabulary, (options.rows,), generator=draw, device=device),
    )


def _near_inputs(options: LossBenchOptions, draw: torch.Generator, device: torch.device) -> Inputs:
    """A student with the teacher's head, whose hidden states are the teacher's and a little noise."""
    rows, width = options.error_rows, options.student_width
    vocabulary = min(options.vocabulary, options.error_vocabulary)
    hidden = torch.randn(rows, width, generator=draw, device=device)
    noise = torch.randn(rows, width, generator=draw, device=device)
    weight = torch.randn(vocabulary, width, generator=draw, device=device) * 3 * width**-0.5
    labels = torch.randint(0, vocabulary, (rows,), generator=draw, device=device)
    # Both sides start from values that bf16 holds, so that the error is that of the loss alone.
    near, hidden, weight = (t.bfloat16().float() for t in (hidden + NEAR_DISTANCE * noise, hidden, weight))
    return Inputs(near, weight, hidden, weight, labels)


def _entries(options: LossBenchOptions, device: torch.device) -> tuple[list[_Entry], list[dict]]:
    entries, absent = [], []
    first = options.divergences[0]
    for dtype in options.dtypes:
        if device.type != "cpu" or dtype == "float32":
            entries.append(_Entry(LossBenchRow("gemm_floor", "", dtype), _Floor(device)))
        entries.append(_Entry(LossBenchRow("full", first, dtype), _ours(reference_kd_loss, first)))
        for divergence in options.divergences:
            for budget in options.budgets if divergence == first else options.budgets[:1]:
                row = LossBenchRow("fused", divergence, dtype, budget)
                entries.append(_Entry(row, _ours(fused_kd_loss, divergence, memory_budget=parse_bytes(budget))))
        for peer in PEERS if options.peers else ():
            _add_peer(peer, first, dtype, device, entries, absent)
    return entries, absent


def _add_peer(
    peer: Peer, divergence: str, dtype: str, device: torch.device, entries: list[_Entry], absent: list[dict]
) -> None:
    reason, loss = peer.load(divergence, device)
    if loss is None:
        absent.append({"implementation": peer.name, "dtype": dtype, "reason": reason})
        return
    row = LossBenchRow(peer.name, "cross_entropy" if peer.cross_entropy else divergence, dtype)
    entries.append(_Entry(row, loss, exact_scale=False))


def _ours(loss: Callable, divergence: str, **options: object) -> Callable[[Inputs], Tensor]:
    def call(inputs: Inputs) -> Tensor:
        return loss(
            inputs.student_hidden, Head(inputs.student_weight), inputs.teacher_hidden, Head(inputs.teacher_weight),
            divergence=divergence, **options,
        ).loss  # fmt: skip

    return call


class _Floor:
    """The four matrix products of the loss and nothing else, at the best of several tile shapes.

    The first call tries all shapes, later ones the two that were best.
    """

    def __init__(self, device: torch.device) -> None:
        self.tiles = list(FLOOR_TILES[device.type])
        self.seconds = float("inf")

    def __call__(self, inputs: Inputs) -> None:
        """Measure once; the best of the shapes is in `seconds`."""
        times = sorted((_products_seconds(inputs, *tile), tile) for tile in self.tiles)
        self.seconds, self.tiles = times[0][0], [tile for _, tile in times[:2]]


def _products_seconds(inputs: Inputs, window: int, shard: int) -> float:
    hidden, weight = inputs.student_hidden.detach(), inputs.student_weight.detach()
    hidden_gradient, weight_gradient = torch.empty_like(hidden), torch.empty_like(weight)
    tile = torch.empty(window * shard, dtype=weight.dtype, device=weight.device)
    started = _now(hidden.device)
    for top in range(0, len(hidden), window):
        rows = slice(top, top + window)
        for left in range(0, len(weight), shard):
            columns = slice(left, left + shard)
            height, width = len(hidden[rows]), len(weight[columns])
            logits = tile[: height * width].view(height, width)
            torch.mm(hidden[rows], weight[columns].t(), out=logits)
            torch.mm(inputs.teacher_hidden[rows], inputs.teacher_weight[columns].t(), out=logits)
            hidden_gradient[rows].addmm_(logits, weight[columns], beta=float(left > 0))
            weight_gradient[columns].addmm_(logits.t(), hidden[rows], beta=float(top > 0))
    return _now(hidden.device) - started


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _turn(entry: _Entry, device: torch.device) -> float:
    """Seconds of one forward and backward."""
    entry.inputs.clear()
    started = _now(device)
    loss = entry.loss(entry.inputs)
    if loss is None:
        return entry.loss.seconds
    loss.backward()
    return _now(device) - started


def _warmed_up(
    entries: list[_Entry],
    absent: list[dict],
    options: LossBenchOptions,
    base: Inputs,
    near: Inputs,
    device: torch.device,
) -> list[_Entry]:
    """Run each once: errors, scratch, compilation. A peer that fails is listed with its reason and leaves the table."""
    truths: dict[tuple[str, bool, str], Tensor] = {}
    running = []
    for entry in entries:
        row = entry.row
        try:
            if row.implementation in ("gemm_floor", "fused"):
                _turn(entry, device)  # tile shapes are tried, kernels compile
            if row.implementation != "gemm_floor":
                row.peak_bytes, row.scratch_bytes = _memory(entry, device)
                dtype = getattr(torch, row.dtype)
                apart = base.to(dtype, options.error_rows, options.error_vocabulary)
                row.gradient_error = _error(entry, apart, truths, False)
                row.gradient_error_near = _error(entry, near.to(dtype), truths, True)
        except Exception as error:
            entry.inputs.clear()
            short = row.implementation == "full" and isinstance(error, torch.OutOfMemoryError)
            if row.implementation in ("gemm_floor", "full", "fused") and not short:
                raise
            reason = f"does not run here: {type(error).__name__}: {str(error).strip().splitlines()[:1]}"
            absent.append({"implementation": row.implementation, "dtype": row.dtype, "reason": reason})
            continue
        running.append(entry)
    return running


def _memory(entry: _Entry, device: torch.device) -> tuple[int, int]:
    """Peak bytes with and without the gradients."""
    inputs = entry.inputs
    inputs.clear()
    peak = peak_extra_bytes(lambda: entry.loss(inputs).backward(), device)
    hidden, weight = inputs.student_hidden, inputs.student_weight
    weight_element = 4 if entry.row.implementation == "fused" else weight.element_size()
    gradients = hidden.numel() * hidden.element_size() + weight.numel() * weight_element
    return peak, max(peak - gradients, 0)


def _error(entry: _Entry, inputs: Inputs, truths: dict[tuple[str, bool, str], Tensor], near: bool) -> float:
    """Relative error of the head's gradient. Peers that sum or scale differently are compared up to a factor."""
    key = (entry.row.divergence, near, entry.row.dtype)
    if key not in truths:
        exact = inputs.to(torch.float64)
        if entry.row.divergence == "cross_entropy":
            torch.nn.functional.cross_entropy(exact.student_hidden @ exact.student_weight.t(), exact.labels).backward()
        else:
            _ours(reference_kd_loss, entry.row.divergence)(exact).backward()
        truths[key] = exact.student_weight.grad
    truth = truths[key]
    entry.loss(inputs).backward()
    found = inputs.student_weight.grad.double()
    if not entry.exact_scale:
        found = found * ((found * truth).sum() / found.square().sum())
    return ((found - truth).norm() / truth.norm()).item()
