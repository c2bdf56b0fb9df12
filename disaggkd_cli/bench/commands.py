"""`disaggkd bench …` on the command line: parse, measure, print."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Annotated

import typer

from disaggkd_cli.terminal import write
from disaggkd_cli.verbosity import command

bench_app = typer.Typer(
    help="Measured figures against full logits, installed peers and what the machine can do.", no_args_is_help=True
)

_HEAD_HELP = "A ready shape, for a GPU: `reference` is V = 248320, H_s = 4096, H_t = 2048, 8192 rows, bf16."
AsJson = Annotated[bool, typer.Option("--json", metavar="", help="Print the measurements as JSON.")]

ResultsDirectory = Annotated[
    str | None,
    typer.Option("--results", metavar="DIR", help="Where measurements are kept; default: beside the run_dir."),
]
Fresh = Annotated[bool, typer.Option("--fresh", metavar="", help="Begin anew; else a bench that was cut off goes on.")]


@command(bench_app)
def loss(
    head: Annotated[str | None, typer.Option(help=_HEAD_HELP)] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Token positions; 2048.")] = None,
    vocabulary: Annotated[int | None, typer.Option(min=2, help="Size of both vocabularies; 32768.")] = None,
    student_width: Annotated[int | None, typer.Option(min=1, help="Hidden size of the student; 512.")] = None,
    teacher_width: Annotated[int | None, typer.Option(min=1, help="Hidden size of the teacher; 1024.")] = None,
    divergence: Annotated[list[str] | None, typer.Option(help="May be repeated; `all` means every one.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="float32 or bfloat16; may be repeated.")] = None,
    budget: Annotated[list[str] | None, typer.Option(help="Memory budget of the fused loss; may be repeated.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each; the best counts.")] = 3,
    peers: Annotated[bool, typer.Option(metavar="", help="Measure installed peers' losses too.")] = True,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    as_json: AsJson = False,
) -> None:
    """The fused loss against full logits, the matrix products alone, and installed peers: time, scratch, error."""
    from disaggkd_cli.bench.loss import HEADS, LossBenchOptions, print_table, run
    from disaggkd_cli.config import DIVERGENCES

    divergences = tuple(divergence or ["forward_kl"])
    divergences = DIVERGENCES if divergences == ("all",) else divergences
    _known("divergence", divergences, DIVERGENCES)
    _known("dtype", dtype, _DTYPES)
    _known("head", None if head is None else [head], HEADS)
    given = {
        "rows": rows,
        "vocabulary": vocabulary,
        "student_width": student_width,
        "teacher_width": teacher_width,
        "dtypes": tuple(dtype or ()),
        "budgets": tuple(budget or ()),
    }
    shape = HEADS.get(head, {}) | {name: value for name, value in given.items() if value}
    options = LossBenchOptions(divergences=divergences, repeats=repeats, peers=peers, device=device, seed=seed, **shape)
    result = run(options)
    if as_json:
        write(json.dumps(result, indent=2))
    else:
        print_table(result)


@command(bench_app)
def link(
    payload: Annotated[list[str] | None, typer.Option(help="Size of a payload, such as 8MiB; may be repeated.")] = None,
    links: Annotated[list[int] | None, typer.Option(min=1, help="Number of links at once; may be repeated.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each kind; the best counts.")] = 20,
    as_json: AsJson = False,
) -> None:
    """What links carry over loopback against raw gloo, how much a ring hides, what each wire format costs the loss."""
    from disaggkd_cli.bench.link import BYTES_PER_ROW, PAYLOADS, bench_link, format_link_report
    from disaggkd_cli.bench.wire import bench_wire, format_wire_rows
    from disaggkd_cli.errors import UserError
    from disaggkd_cli.units import parse_bytes

    sizes = tuple(parse_bytes(size) for size in payload) if payload else PAYLOADS
    for size in sizes:
        if size <= 0 or size % BYTES_PER_ROW:
            raise UserError(f"--payload {size}: must be a multiple of {BYTES_PER_ROW} bytes, one row")
    report = bench_link(sizes, tuple(links or (1, 2, 4)), rounds=rounds, log=lambda line: write(line, sys.stderr))
    report["wire"] = bench_wire()
    if as_json:
        write(json.dumps(report, indent=2))
    else:
        write(f"{format_link_report(report)}\n\n{format_wire_rows(report['wire'])}")


@command(bench_app)
def step(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="The pair, data and batch to measure.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Dotted overrides.")] = None,
    steps: Annotated[int, typer.Option(min=4, help="Optimizer steps of each run; a quarter is warm-up.")] = 20,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; the modes take turns in each.")] = 3,
    mode: Annotated[list[str] | None, typer.Option(help="Only this mode; may be repeated.")] = None,
    on_policy: Annotated[
        bool, typer.Option("--on-policy", metavar="", help="The config as it is, its student writing: lag 0 and 1.")
    ] = False,
    memory: Annotated[bool, typer.Option(metavar="", help="On CPUs, measure memory in runs of their own.")] = True,
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Also write a page with the runs overlaid.")] = None,
    results: ResultsDirectory = None,
    fresh: Fresh = False,
    as_json: AsJson = False,
) -> None:
    """One pair in three modes, on the same ranks and batch: speed, memory by role, stalls, losses, medians.

    With --mode teacher_one_rank, teacher_pipeline, teacher_fsdp or teacher_tensor: layouts of the teacher compared.
    With --on-policy: tokens written and trained a second, and the share of writing, weights, judging and training.
    Started again with the same arguments after it was cut off, it goes on where it was.
    """
    from disaggkd_cli.bench.layouts import LAYOUT_MODES
    from disaggkd_cli.bench.on_policy import ON_POLICY_MODES
    from disaggkd_cli.bench.runs import MODES
    from disaggkd_cli.bench.step import StepBenchOptions, bench_step
    from disaggkd_cli.bench.step_report import format_step_report

    _known("mode", mode, (*MODES, *LAYOUT_MODES, *ON_POLICY_MODES))
    mode = [*(mode or ()), *(ON_POLICY_MODES if on_policy else ())]
    options = StepBenchOptions(
        config, tuple(overrides or ()), steps, repeats, tuple(mode or MODES), memory, results, fresh
    )
    result = bench_step(options, lambda line: write(line, sys.stderr), html)
    write(json.dumps(result, indent=2) if as_json else format_step_report(result))


@command(bench_app)
def frontier(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="The pair, data and batch to start from.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Dotted overrides.")] = None,
    cap: Annotated[str | None, typer.Option(help="What a rank's tensors may take: 512MiB, on a GPU all of it.")] = None,
    teacher_layers: Annotated[list[int] | None, typer.Option(min=1, help="Layers; may be repeated.")] = None,
    teacher_widths: Annotated[list[int] | None, typer.Option(min=8, help="Hidden sizes; may be repeated.")] = None,
    micro_batches: Annotated[list[int] | None, typer.Option(min=1, help="Sequences; may be repeated.")] = None,
    vocabularies: Annotated[list[int] | None, typer.Option(min=2, help="Sizes; may be repeated.")] = None,
    ranks: Annotated[list[int] | None, typer.Option(min=2, help="Ranks in all, on the same global batch.")] = None,
    mode: Annotated[list[str] | None, typer.Option(help="Only this mode; may be repeated.")] = None,
    cap_loading: Annotated[bool, typer.Option("--cap-loading", metavar="", help="Limit loading too.")] = False,
    results: ResultsDirectory = None,
    fresh: Fresh = False,
    as_json: AsJson = False,
) -> None:
    """Under a real cap on each rank's memory, what each mode still trains, and what the planner predicted.

    Started again with the same arguments after it was cut off, it goes on where it was.
    """
    from disaggkd_cli.bench.frontier import FrontierOptions, bench_frontier, parse_cap
    from disaggkd_cli.bench.frontier_report import format_frontier_report
    from disaggkd_cli.bench.runs import MODES

    _known("mode", mode, MODES)
    options = FrontierOptions(
        config,
        tuple(overrides or ()),
        None if cap is None else parse_cap(cap),
        teacher_layers=tuple(teacher_layers or ()),
        teacher_widths=tuple(teacher_widths or ()),
        micro_batches=tuple(micro_batches or ()),
        vocabularies=tuple(vocabularies or ()),
        ranks=tuple(ranks or ()),
        modes=tuple(mode or MODES),
        cap_loading=cap_loading,
        results=results,
        fresh=fresh,
    )
    result = bench_frontier(options, lambda line: write(line, sys.stderr))
    write(json.dumps(result, indent=2) if as_json else format_frontier_report(result))


_DTYPES = ("float32", "bfloat16")


def _known(option: str, given: Iterable[str] | None, known: Iterable[str]) -> None:
    """Raise a UserError for the first word that the option does not know."""
    from disaggkd_cli.errors import UserError

    for one in given or ():
        if one not in known:
            raise UserError(f"--{option} {one}: is not known; there are {', '.join(known)}")
