"""`disaggkd bench link` runs, and its figures have the shape that --json promises."""

import pytest

from disaggkd_cli.bench.link import BYTES_PER_ROW, bench_link, format_link_report

pytestmark = pytest.mark.timeout(120)


def test_a_short_bench_reports_every_size_and_depth():
    sizes = (BYTES_PER_ROW, 64 * BYTES_PER_ROW)
    report = bench_link(payloads=sizes, links=(1,), volume=2**18, rounds=2, overlap_steps=3)
    assert [(row["payload_bytes"], row["links"]) for row in report["rows"]] == [(size, 1) for size in sizes]
    for row in report["rows"]:
        assert all(row[key] > 0 for key in ("bytes_per_second", "raw_bytes_per_second", "round_trip_seconds"))
        assert row["ring_bytes_per_second"] > 0 and row["checksum_bytes_per_second"] > 0
    assert [row["ring_depth"] for row in report["overlap"]] == [1, 2, 3]
    text = format_link_report(report)
    assert "4.00 KiB" in text and "ring depth 3" in text and "ms a step" in text
