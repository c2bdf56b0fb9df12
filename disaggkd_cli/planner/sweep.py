"""`--sweep KEY=VALUES`: plan every combination and print one row each."""

from __future__ import annotations

import copy
import itertools
import json
import re
from dataclasses import replace
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from disaggkd_cli.config import Config, check
from disaggkd_cli.config.check import get
from disaggkd_cli.errors import UserError
from disaggkd_cli.planner.inputs import workload_of
from disaggkd_cli.planner.options import PlanOptions
from disaggkd_cli.planner.plan import Plan, as_json, make_plan
from disaggkd_cli.planner.workload import MODES
from disaggkd_cli.units import printable

MAX_COMBINATIONS = 2000
_RANGE = re.compile(r"(\d+(?:\.\d+)?):(\d+(?:\.\d+)?):([x+])(\d+(?:\.\d+)?)")
_TOKENS = "train.micro_batch_tokens"
"""Not a key of the config: it sets the micro-batch of the plan in tokens, whatever the sequence length divides."""


def parse_sweep(text: str) -> tuple[str, list[Any]]:
    """Return key and values of `KEY=a,b,c` or `KEY=first:last:xfactor` or `KEY=first:last:+step`.

    Raises:
        UserError: when it is neither.
    """
    key, equals, values = text.partition("=")
    if not equals or not key or not values:
        raise UserError(f"--sweep: {text!r} must be KEY=VALUE,VALUE or KEY=FIRST:LAST:xFACTOR")
    ranged = _RANGE.fullmatch(values)
    if not ranged:
        return key, [_value(text, value) for value in values.split(",")]
    first, last, kind, step = float(ranged[1]), float(ranged[2]), ranged[3], float(ranged[4])
    if (kind == "x" and (step <= 1 or first <= 0)) or (kind == "+" and step <= 0):
        raise UserError(f"--sweep: {text!r} never reaches its end; the factor must be above 1, the step above 0")
    found = []
    while first <= last * (1 + 1e-9):
        found.append(int(first) if first.is_integer() else first)
        first = first * step if kind == "x" else first + step
        if len(found) > MAX_COMBINATIONS:
            raise UserError(f"--sweep: {text!r} has more than {MAX_COMBINATIONS} values")
    return key, found


def _value(text: str, value: str) -> Any:
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"--sweep: {printable(text)}: {printable(value)} is no value: {problem}") from None


def run_sweep(config: Config, sweeps: list[str], options: PlanOptions, console: Console) -> int:
    """Plan every combination of the sweeps; 0 when some combination fits, else 3."""
    axes = [parse_sweep(text) for text in sweeps]
    combinations = list(itertools.product(*(values for _, values in axes)))
    if len(combinations) > MAX_COMBINATIONS:
        raise UserError(f"--sweep: {len(combinations)} combinations are more than {MAX_COMBINATIONS}")
    keys = [key for key, _ in axes]
    rows = [(values, _plan_of(config, dict(zip(keys, values, strict=True)), options)) for values in combinations]
    if options.json:
        rows_json = [{"values": dict(zip(keys, values, strict=True)), **as_json(plan)} for values, plan in rows]
        console.print(json.dumps({"rows": rows_json}, indent=2), highlight=False, soft_wrap=True)
    else:
        console.print(_table(keys, rows))
    return 0 if any(plan.verdict.mode for _, plan in rows) else 3


def _plan_of(config: Config, values: dict[str, Any], options: PlanOptions) -> Plan:
    changed = copy.deepcopy(config)
    for key, value in values.items():
        if key != _TOKENS:
            _set(changed, key, value)
    problems = check(changed)
    if problems:
        raise UserError("--sweep: " + "; ".join(problems))
    work = workload_of(changed, options.hardware, options.gpus)
    if _TOKENS in values:
        tokens = values[_TOKENS]
        if not isinstance(tokens, int) or tokens < 1:
            raise UserError(f"--sweep: {_TOKENS}={tokens!r} must be a number of tokens")
        work = replace(work, micro_batch_tokens=tokens, sequence=min(work.sequence, tokens))
    return make_plan(work, options.gpus, with_knobs=False)


def _set(config: Config, key: str, value: Any) -> None:
    parent, _, name = key.rpartition(".")
    try:
        section = get(config, parent) if parent else config
        present = getattr(section, name)
    except AttributeError:
        raise UserError(f"--sweep: {key} is no key of the config (nor {_TOKENS})") from None
    if isinstance(present, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if isinstance(present, (bool, int, float, str)) and type(value) is not type(present):
        raise UserError(f"--sweep: {key}={value!r} must be a {type(present).__name__}")
    setattr(section, name, value)


def _table(keys: list[str], rows: list[tuple[tuple[Any, ...], Plan]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for key in keys:
        table.add_column(Text(printable(key.rpartition(".")[2])), justify="right")
    for mode in MODES:
        table.add_column(mode.replace("_", ", ") + "\nGiB · tok/s · largest", justify="right")
    table.add_column("take")
    for values, plan in rows:
        cells: list[str | Text] = [Text(printable(str(value))) for value in values]
        for mode in MODES:
            one = plan.modes[mode]
            peak = " + ".join(f"{memory.peak_bytes / 2**30:.1f}" for memory in one.ranks.values())
            speed = f"{one.timing.tokens_per_second:,.0f}" if one.fits else "no fit"
            cells.append(f"{peak} · {speed} · {one.max_micro_batch_tokens:,}")
        table.add_row(*cells, (plan.verdict.mode or "nothing").replace("_", ", "))
    return table
