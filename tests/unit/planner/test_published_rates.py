"""Times against runs that others published: the band that is printed is the one of the rows held out of the fit."""

from __future__ import annotations

import statistics

import pytest

from disaggkd_cli.planner.constants import ERROR_BANDS
from disaggkd_cli.planner.efficiency import KERNELS
from disaggkd_cli.planner.published_rates import predict_rate, published_rates


def errors(*, held_out: bool, sparse: bool) -> list[float]:
    rows = [row for row in published_rates() if (row.held_out, row.sparse) == (held_out, sparse)]
    return sorted(abs(predict_rate(row) / row.tokens_per_second - 1) for row in rows)


def test_half_of_the_rows_are_held_out():
    held = [row.held_out for row in published_rates()]
    assert len(held) > 120 and 0.45 < sum(held) / len(held) < 0.55


def test_held_out_dense_rows_are_within_the_band_that_is_printed():
    found = errors(held_out=True, sparse=False)
    median, ninth = statistics.median(found), found[int(0.9 * len(found))]
    printed = f"median {median:.0%}, nine in ten within {ninth:.0%}, worst {found[-1]:.0%}".replace("%", " %")
    assert ERROR_BANDS["times, dense models, published runs held out of the fit"] == printed
    assert median < 0.12
    assert sum(error > 0.2 for error in found) <= 1


def test_held_out_expert_rows_are_within_the_band_that_is_printed():
    found = errors(held_out=True, sparse=True)
    printed = f"median {statistics.median(found):.0%}, worst +{found[-1]:.0%}".replace("%", " %")
    assert ERROR_BANDS["times, mixtures of experts, published runs held out of the fit"] == printed


def test_shares_are_shares():
    for rates in KERNELS.rates.values():
        assert 0 < rates.attention <= rates.matmul <= 1
    assert 0 < KERNELS.experts <= 1 and 0 <= KERNELS.exposed <= 1 and 0 < KERNELS.compiled <= 1


@pytest.mark.parametrize("length", [32_768, 65_536])
def test_long_sequences_are_not_priced_like_matrix_products(length):
    row = next(row for row in published_rates() if (row.model, row.sequence, row.gpu) == ("mpt-7b", length, "H100-SXM"))
    assert abs(predict_rate(row) / row.tokens_per_second - 1) < 0.1
