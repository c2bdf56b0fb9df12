"""`disaggkd plan`: options to output. Returns the exit code; everything it prints goes to standard output."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from disaggkd_cli.config import Config
from disaggkd_cli.config.linear_attention import missing_kernels
from disaggkd_cli.errors import UserError
from disaggkd_cli.planner.inputs import workload_of
from disaggkd_cli.planner.models import local_fields
from disaggkd_cli.planner.options import PlanOptions
from disaggkd_cli.planner.plan import Plan, as_json, figures, make_plan
from disaggkd_cli.planner.terms import explain
from disaggkd_cli.terminal import console as terminal_console

EXIT_FITS, EXIT_NOTHING_FITS = 0, 3


def plan_command(config: Config, options: PlanOptions, console: Console | None = None) -> int:
    """Plan `config` and print what `options` ask for.

    Returns:
        0 when a mode fits, 3 when none does; with `--verify` 1 when a prediction is off by more than its band.

    Raises:
        UserError: unknown models or hardware, impossible options.
    """
    console = console or terminal_console()
    if options.gpus is not None and options.gpus < 1:
        raise UserError(f"--gpus: {options.gpus} must be at least 1")
    if options.sweep:
        from disaggkd_cli.planner.sweep import run_sweep

        return run_sweep(config, options.sweep, options, console)
    work = workload_of(config, options.hardware, options.gpus)
    if options.verify:
        from disaggkd_cli.planner.verify import verify_command

        return verify_command(config, work, options.json, console)
    if options.measure or options.calibrate:
        from disaggkd_cli.planner.measure import measure_command

        return measure_command(work, options.measure, options.calibrate, options.output, options.json, console)
    plan = make_plan(work, options.gpus, with_knobs=options.explain is None)
    _print(plan, options, console)
    if not options.json and not options.explain and config.launch.device != "cpu":
        for line in missing_kernels(config, local_fields):
            console.print(f"warning: {line}", highlight=False)
    return EXIT_FITS if plan.verdict.mode else EXIT_NOTHING_FITS


def _print(plan: Plan, options: PlanOptions, console: Console) -> None:
    if options.explain:
        text = explain(dict(figures(plan)), options.explain)
        console.print(text, highlight=False, soft_wrap=True)
        return
    simulated = None
    if options.simulate:
        from disaggkd_cli.planner.simulate import simulate_plan

        simulated = simulate_plan(plan)
    if options.html:
        from disaggkd_cli.planner.report_html import render_html

        _write(Path(options.html), render_html(plan))
    if options.json:
        plain = as_json(plan)
        if simulated is not None:
            plain["simulation"] = [vars(one) for one in simulated]
        console.print(json.dumps(plain, indent=2), highlight=False, soft_wrap=True)
        return
    from disaggkd_cli.planner.report_text import print_plan

    print_plan(plan, console)
    if simulated is not None:
        from disaggkd_cli.planner.simulate import simulation_table

        console.print(simulation_table(plan, simulated))
    if options.html:
        console.print(f"wrote {options.html}", highlight=False)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--html: {path} cannot be written: {error.strerror}") from None
