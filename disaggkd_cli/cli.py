"""The command line: parse, call, print. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from disaggkd_cli import __version__
from disaggkd_cli.bench.commands import bench_app
from disaggkd_cli.errors import DisaggkdError
from disaggkd_cli.exits import end_if_rank
from disaggkd_cli.gpus import prepare_allocator
from disaggkd_cli.terminal import write
from disaggkd_cli.verbosity import command, is_verbose, say

app = typer.Typer(
    name="disaggkd",
    help="Distil a large causal language model into a small one, with the teacher on ranks of its own.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(bench_app, name="bench")

ConfigPath = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file that describes the run.")]


def _complete_override(args: list[str], incomplete: str) -> list[tuple[str, str]]:
    from disaggkd_cli.config.reference import complete, complete_value

    # Bash takes KEY=VALUE apart at the sign, and replaces what stands behind it.
    if incomplete == "=" and args:
        return complete_value(args[-1], "")
    if len(args) > 1 and args[-1] == "=":
        return complete_value(args[-2], incomplete)
    return complete(incomplete)


def _complete_key(incomplete: str) -> list[tuple[str, str]]:
    from disaggkd_cli.config.reference import complete

    return [(name.rstrip("="), text) for name, text in complete(incomplete)]


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Dotted overrides, such as train.steps=20.",
        autocompletion=_complete_override,
    ),
]
PrintConfig = Annotated[
    bool, typer.Option("--print-config", metavar="", help="Print the config with every default and stop.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", metavar="", help="Check, print ranks and roles, and stop.")]
Resume = Annotated[
    str, typer.Option(metavar="auto|never|PATH", help="Go on from the newest valid checkpoint, or from this one.")
]
Restarts = Annotated[int, typer.Option(min=0, help="How often the student, and each teacher, may be started again.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", metavar="", help="Delete the run in run_dir (asks on a terminal).")
]


_ONLY = "Run this check only; repeatable. All but `fused loss`, `gradients` and `checkpoint` take seconds."


@app.callback(invoke_without_command=True)
def _main(
    version: Annotated[bool, typer.Option("--version", metavar="", help="Print the version and stop.")] = False,
) -> None:
    if version:
        write(__version__)
        raise typer.Exit


@command(app)
def run(
    config: ConfigPath,
    overrides: Overrides = None,
    resume: Resume = "never",
    restarts: Restarts = 3,
    overwrite: Overwrite = False,
    print_config: PrintConfig = False,
    dry_run: DryRun = False,
) -> None:
    """The whole job. Started bare it spawns the ranks on this machine; under torchrun or SLURM it takes its role."""
    from disaggkd_cli.jobs import run_job

    raise typer.Exit(run_job("run", config, overrides or [], resume, restarts, print_config, dry_run, overwrite))


@command(app)
def student(
    config: ConfigPath,
    overrides: Overrides = None,
    resume: Resume = "never",
    restarts: Restarts = 3,
    overwrite: Overwrite = False,
    print_config: PrintConfig = False,
    dry_run: DryRun = False,
) -> None:
    """The student as a job of its own: waits for teachers at launch.rendezvous, and survives losing them."""
    from disaggkd_cli.jobs import run_job

    raise typer.Exit(run_job("student", config, overrides or [], resume, restarts, print_config, dry_run, overwrite))


@command(app)
def teacher(
    config: ConfigPath,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
    dry_run: DryRun = False,
    record: Annotated[
        str | None, typer.Option(metavar="DIR", help="Record this run's hidden states for teacher.cache and end.")
    ] = None,
) -> None:
    """One teacher replica as a job of its own: joins the student at launch.rendezvous; may come and go."""
    from disaggkd_cli.jobs import record_job, run_job

    if record is not None:
        raise typer.Exit(record_job(config, overrides or [], record))
    raise typer.Exit(run_job("teacher", config, overrides or [], "never", 0, print_config, dry_run))


@command(app)
def plan(
    config: ConfigPath,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print everything as JSON.")] = False,
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Also write a self-contained page.")] = None,
    explain: Annotated[str | None, typer.Option(metavar="TERM", help="A figure's formula; `all` lists them.")] = None,
    gpus: Annotated[int | None, typer.Option(help="Divide so many GPUs as well as possible.")] = None,
    hardware: Annotated[str | None, typer.Option(metavar="NAME", help="A GPU or node of the catalogue.")] = None,
    sweep: Annotated[
        list[str] | None, typer.Option(metavar="KEY=A,B", help="Plan each value (or FIRST:LAST:xFACTOR); repeatable.")
    ] = None,
    simulate: Annotated[bool, typer.Option("--simulate", metavar="", help="Simulate each rank.")] = False,
    verify: Annotated[bool, typer.Option("--verify", metavar="", help="Trace a step and compare.")] = False,
    measure: Annotated[str | None, typer.Option(metavar="RUN_DIR", help="Compare with a finished run.")] = None,
    calibrate: Annotated[str | None, typer.Option(metavar="RUN_DIR", help="Fit efficiencies to a run.")] = None,
    output: Annotated[str | None, typer.Option(metavar="FILE", help="Where --calibrate writes.")] = None,
) -> None:
    """Memory, traffic, bottleneck, verdict: what fits, how fast, and why, before anything is rented."""
    from disaggkd_cli.config import load
    from disaggkd_cli.planner.command import PlanOptions, plan_command

    options = PlanOptions(
        as_json, html, explain, gpus, hardware, sweep or [], simulate, verify, measure, calibrate, output
    )
    raise typer.Exit(plan_command(load(config, overrides or []), options))


@command(app)
def check(
    config: ConfigPath,
    overrides: Overrides = None,
    only: Annotated[list[str] | None, typer.Option(metavar="NAME", help=_ONLY)] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print the results as JSON.")] = False,
) -> None:
    """Prove on this config that loss, heads, vocabulary, masks and wire are right. Exits 1 when a check fails."""
    from disaggkd_cli.checks.command import check_command

    raise typer.Exit(check_command(config, overrides or [], only, as_json))


@command(app)
def report(
    run_dirs: Annotated[list[str], typer.Argument(metavar="RUN_DIR", help="Directories of runs, going or done.")],
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="The page.")] = "report.html",
) -> None:
    """One self-contained HTML page: curves, stalls, memory against the plan, links; several runs overlaid."""
    from disaggkd_cli.report.command import report_command

    raise typer.Exit(report_command(run_dirs, output))


@command(app)
def export(
    run_dir: Annotated[str, typer.Argument(metavar="RUN_DIR", help="Directory of a run.")],
    step: Annotated[int | None, typer.Option(help="Of which checkpoint; the newest valid one without.")] = None,
    dtype: Annotated[str | None, typer.Option(metavar="DTYPE", help="bfloat16, float16 or float32.")] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", metavar="DIR", help="Where to.")] = None,
) -> None:
    """Write a checkpoint of a run as a model directory to publish, with a model card."""
    from disaggkd_cli.export_command import export_command

    export_command(run_dir, step, dtype, output)


@command(app)
def init(
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help="Which one; --list names them.")] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", metavar="FILE", help="Default: RECIPE.yaml.")] = None,
    list_them: Annotated[bool, typer.Option("--list", metavar="", help="List the recipes and stop.")] = False,
) -> None:
    """Write a commented config to start from."""
    from disaggkd_cli.recipes import recipes, write_recipe

    if list_them or recipe is None:
        width = max(map(len, recipes()))
        for entry in recipes().values():
            write(f"{entry.name:{width}}  {entry.purpose}")
        write("\ndisaggkd init RECIPE writes RECIPE.yaml here.")
        return
    target = Path(output or f"{recipe}.yaml")
    write_recipe(recipe, target)
    say(f"{target}: edit it, then `disaggkd run {target} --dry-run` and `disaggkd check {target}`")


@command(app)
def explain(
    key: Annotated[
        str,
        typer.Argument(metavar="KEY", help="train.warmup_steps, or a section.", autocompletion=_complete_key),
    ],
) -> None:
    """What a key of the config does, its default and its choices; or what a section holds."""
    from disaggkd_cli.config.reference import explain as explain_key

    write(explain_key(key.rstrip(".=")))


@command(app)
def env() -> None:
    """Versions, machine and devices, to put into a report of a fault."""
    from disaggkd_cli.environment import describe

    found = describe()
    width = max(map(len, found))
    for name, value in found.items():
        write(f"{name:{width}}  {value}")


def main() -> None:
    """Run the command line; errors meant for a person become one message and their exit code."""
    prepare_allocator()
    try:
        app()
    except DisaggkdError as error:
        if is_verbose():
            write(traceback.format_exc(), sys.stderr, end="")
        write(f"disaggkd: {error}", sys.stderr)
        _leave(error.exit_code)
    except SystemExit as end:
        _leave(end.code)


def _leave(code: str | int | None) -> NoReturn:
    if code is None or isinstance(code, int):
        end_if_rank(code or 0)
    sys.exit(code)
