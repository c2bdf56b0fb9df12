"""`--explain TERM`: the formula of a figure, with the numbers in it and where it comes from."""

from __future__ import annotations

from collections.abc import Iterator

from disaggkd_cli.errors import UserError
from disaggkd_cli.planner.constants import CONSTANTS
from disaggkd_cli.planner.flops import student_flops, teacher_flops
from disaggkd_cli.planner.plan import Plan
from disaggkd_cli.planner.terms import Term


def explain(plan: Plan, wanted: str) -> str:
    """Return the explanation of every figure whose name contains `wanted`, or the list of names for `all`.

    Raises:
        UserError: when no figure's name contains it.
    """
    found = dict(figures(plan))
    if wanted == "all":
        return "\n".join([*found, *(f"constant: {name}" for name in CONSTANTS)])
    folded = wanted.lower()
    lines = [f"[{where}] {one.explain()}" for where, one in found.items() if folded in where.lower()]
    for name, one in CONSTANTS.items():
        if folded in name.lower() or folded in name.replace("_", " ").lower():
            lines.append(f"[constant] {name} = {one.value:g} {one.unit} ({one.kind})\n  source: {one.source}")
    if not lines:
        raise UserError(f"--explain: no figure is called {wanted!r}; `--explain all` lists the names")
    return "\n".join(lines)


def figures(plan: Plan) -> Iterator[tuple[str, Term]]:
    """Every figure of the plan under `mode / rank / phase / name`, each term once per kind of rank."""
    for mode, one in plan.modes.items():
        for role, memory in one.ranks.items():
            seen: set[Term] = set()
            for phase in memory.phases:
                for part in phase.terms:
                    key = (part.name, part.value)
                    if key not in seen:
                        seen.add(key)
                        yield f"{mode} / {role} / {phase.name} / {part.name}", part
            yield f"{mode} / {role} / usable memory", one.usable[role]
        yield f"{mode} / teacher micro-batch", one.timing.teacher
        yield f"{mode} / student micro-batch", one.timing.student
    yield "teacher FLOPs a token", teacher_flops(plan.work)
    yield "student FLOPs a token", student_flops(plan.work)
    for name, one in vars(plan.traffic).items():
        yield f"traffic / {name.replace('_', ' ')}", one
