"""A figure together with the formula that gave it: what is printed by `--explain` is what was computed, from one
text."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from disaggkd_cli.errors import UserError
from disaggkd_cli.planner.constants import CONSTANTS

_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
_CALLS = {"max": max, "min": min, "sqrt": math.sqrt, "log": math.log, "ceil": math.ceil}


@dataclass(frozen=True)
class Term:
    """One named figure. `formula` over `values` gives `value`; `source` says where the formula comes from."""

    name: str
    value: float
    formula: str
    values: Mapping[str, float] = field(default_factory=dict)
    source: str = ""

    def explain(self) -> str:
        """The formula with its numbers in it."""
        numbers = ", ".join(f"{name} = {_number(value)}" for name, value in self.values.items())
        return (
            f"{self.name} = {self.formula}\n  with {numbers or 'no variables'}\n  = {_number(self.value)}\n  "
            f"source: {self.source}"
        )


def term(name: str, formula: str, source: str, **values: float) -> Term:
    """Return the term `name` with the value of `formula` (plain arithmetic, max, min, sqrt, log, ceil) at `values`."""
    return Term(name, evaluate(formula, values), formula, values, source)


def evaluate(formula: str, values: Mapping[str, float]) -> float:
    """Return the value of an arithmetic formula.

    Raises:
        KeyError: when the formula names a variable that `values` lacks.
        ValueError: when it is more than arithmetic.
    """
    return _evaluate(_parse(formula), values)


def total(terms: list[Term] | tuple[Term, ...]) -> float:
    """The sum of the terms' values."""
    return sum(one.value for one in terms)


@lru_cache(maxsize=512)
def _parse(formula: str) -> ast.expr:
    return ast.parse(formula, mode="eval").body


def _evaluate(node: ast.expr, values: Mapping[str, float]) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](_evaluate(node.left, values), _evaluate(node.right, values))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand, values)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS:
        return _CALLS[node.func.id](*(_evaluate(argument, values) for argument in node.args))
    raise ValueError(f"{ast.dump(node)} is more than arithmetic")


def _number(value: float) -> str:
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.4g}"


def explain(figures: Mapping[str, Term], wanted: str) -> str:
    """Return the explanation of every figure and constant whose name contains `wanted`, or all names for `all`.

    Raises:
        UserError: when no name contains it.
    """
    if wanted == "all":
        return "\n".join([*figures, *(f"constant: {name}" for name in CONSTANTS)])
    folded = wanted.lower()
    lines = [f"[{where}] {one.explain()}" for where, one in figures.items() if folded in where.lower()]
    for name, one in CONSTANTS.items():
        if folded in name.lower() or folded in name.replace("_", " ").lower():
            lines.append(f"[constant] {name} = {one.value:g} {one.unit} ({one.kind})\n  source: {one.source}")
    if not lines:
        raise UserError(f"--explain: no figure is called {wanted!r}; `--explain all` lists the names")
    return "\n".join(lines)
