"""Fit what kernels achieve to the half of the published rates that is not held out, and print it.

python scripts/fit_efficiencies.py     # the figures of planner/efficiency.py, and the errors of both halves

Gauss-Newton with damping on the logarithms of the rates, whose outliers count less the farther they are off (residuals
beyond 5 % linearly). Bounds keep every share at or below what was ever measured.
"""

from __future__ import annotations

import numpy as np

from disaggkd_cli.planner.efficiency import KERNELS, Kernels, Rates
from disaggkd_cli.planner.published_rates import PublishedRate, predict_rate, published_rates

NAMES = (
    "ampere matmul", "ampere attention", "ampere half_length", "ampere pointwise",
    "hopper matmul", "hopper attention", "hopper half_length", "hopper pointwise",
    "experts", "compiled", "exposed", "float8",
)  # fmt: skip
START = (0.85, 0.5, 500, 1.0, 0.75, 0.4, 500, 1.0, 0.35, 0.7, 0.3, 1.5)
LOW = (0.4, 0.2, 0, 1.0, 0.4, 0.2, 0, 1.0, 0.05, 0.2, 0, 1.0)
HIGH = (1.0, 0.9, 6000, 4.0, 1.0, 0.9, 6000, 4.0, 1.0, 1.0, 1.0, 2.0)
LINEAR_BEYOND = 0.05


def kernels_of(values: np.ndarray) -> Kernels:
    """The kernels that a vector of the parameters describes."""
    rates = {"ampere": Rates(*values[:4]), "hopper": Rates(*values[4:8])}
    experts, compiled, exposed, float8 = (float(one) for one in values[8:])
    return Kernels(rates, experts, compiled, exposed, KERNELS.delta_net, float8)


def residuals(values: np.ndarray, rows: list[PublishedRate]) -> np.ndarray:
    """Logarithm of predicted over published."""
    kernels = kernels_of(values)
    return np.array([np.log(predict_rate(row, kernels) / row.tokens_per_second) for row in rows])


def fit(rows: list[PublishedRate]) -> np.ndarray:
    """The parameters that fit `rows` best."""
    values, damping = np.array(START, dtype=float), 1e-2
    now = residuals(values, rows)
    for _ in range(300):
        jacobian = np.empty((len(rows), len(values)))
        for index in range(len(values)):
            step = 1e-4 * max(abs(values[index]), 1e-3)
            moved = values.copy()
            moved[index] += step
            jacobian[:, index] = (residuals(moved, rows) - now) / step
        weights = 1 / np.sqrt(1 + (now / LINEAR_BEYOND) ** 2)
        normal, gradient = jacobian.T @ (jacobian * weights[:, None]), jacobian.T @ (weights * now)
        while damping < 1e8:
            change = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-12), -gradient)
            tried = np.clip(values + change, LOW, HIGH)
            then = residuals(tried, rows)
            if _cost(then) < _cost(now):
                values, now, damping = tried, then, max(damping / 5, 1e-9)
                break
            damping *= 4
        else:
            break
    return values


def _cost(errors: np.ndarray) -> float:
    return float(np.sum(np.sqrt(1 + (errors / LINEAR_BEYOND) ** 2)))


def main() -> None:
    """Fit, print, judge."""
    rows = published_rates()
    values = fit([row for row in rows if not row.held_out])
    for name, value in zip(NAMES, values, strict=True):
        print(f"{name:<20} {value:.4g}")
    for held_out in (False, True):
        for sparse in (False, True):
            chosen = [row for row in rows if row.held_out == held_out and row.sparse == sparse]
            errors = np.abs(np.expm1(residuals(values, chosen)))
            print(
                f"{'held out' if held_out else 'in the fit'}, {'experts' if sparse else 'dense'}: {len(chosen)} rows, "
                f"median {np.median(errors):.1%}, 90 % {np.quantile(errors, 0.9):.1%}, worst {errors.max():.1%}"
            )


if __name__ == "__main__":
    main()
