"""A figure together with the formula that gave it: what is printed by `--explain` is what was computed, from one
text."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType

from disaggkd_cli.errors import UserError
from disaggkd_cli.planner.constants import CONSTANTS

_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Pow, ast.USub)
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
    try:
        # A formula is compiled from nothing but the arithmetic that `_compiled` has let through.
        return eval(_compiled(formula), {"__builtins__": {}, **_CALLS}, values)  # noqa: S307
    except NameError as error:
        raise KeyError(error.name) from None


def total(terms: list[Term] | tuple[Term, ...]) -> float:
    """The sum of the terms' values."""
    return sum(one.value for one in terms)


@lru_cache(maxsize=512)
def _compiled(formula: str) -> CodeType:
    tree = ast.parse(formula, mode="eval")
    _only_arithmetic(tree.body)
    return compile(tree, "<formula>", "eval")


def _only_arithmetic(node: ast.expr) -> None:
    if isinstance(node, ast.Name) or (isinstance(node, ast.Constant) and isinstance(node.value, (int, float))):
        return
    if isinstance(node, ast.BinOp) and isinstance(node.op, _OPERATORS):
        parts = [node.left, node.right]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, _OPERATORS):
        parts = [node.operand]
    elif isinstance(node, ast.Call) and getattr(node.func, "id", None) in _CALLS and not node.keywords:
        parts = node.args
    else:
        raise ValueError(f"{ast.dump(node)} is more than arithmetic")
    for part in parts:
        _only_arithmetic(part)


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
