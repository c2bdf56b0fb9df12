"""Idle share over the last seconds, and the sentence about the bottleneck."""

import pytest

from disaggkd_cli.transport.meter import WINDOW_SECONDS, BusyMeter, name_bottleneck


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def run(meter, clock, busy, idle, times):
    for _ in range(times):
        begun = meter.begin()
        clock.now += busy
        meter.end(begun)
        clock.now += idle


def test_the_share_counts_from_the_first_work():
    clock = Clock()
    meter = BusyMeter(clock)
    clock.now += 1000
    assert meter.idle_share() == 0.0
    run(meter, clock, 1.0, 3.0, 2)
    assert meter.idle_share() == pytest.approx(0.75)


def test_the_share_forgets_what_is_long_ago():
    clock = Clock()
    meter = BusyMeter(clock)
    run(meter, clock, 1.0, 0.0, 100)
    assert meter.idle_share() == pytest.approx(0.0)
    run(meter, clock, 0.1, 0.9, int(3 * WINDOW_SECONDS))
    assert meter.idle_share() == pytest.approx(0.9, abs=0.02)


def test_work_that_outlasts_the_window_counts_as_busy():
    clock = Clock()
    meter = BusyMeter(clock)
    begun = meter.begin()
    clock.now += 5 * WINDOW_SECONDS
    assert meter.running_seconds() == 5 * WINDOW_SECONDS
    assert meter.idle_share() == pytest.approx(0.0)
    meter.end(begun)
    assert meter.running_seconds() == 0.0
    clock.now += 5 * WINDOW_SECONDS
    assert meter.idle_share() == pytest.approx(0.5)


def test_overlapping_work_counts_once_and_the_oldest_piece_tells_how_long():
    clock = Clock()
    meter = BusyMeter(clock)
    first = meter.begin()
    clock.now += 2
    second = meter.begin()
    clock.now += 1
    assert meter.running_seconds() == 3
    meter.end(first)
    assert meter.running_seconds() == 1
    clock.now += 1
    meter.end(second)
    assert meter.running_seconds() == 0
    clock.now += 4
    assert meter.idle_share() == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("stall", "idle", "depth", "expected"),
    [
        (0.0, 0.1, 3, ""),
        (0.01, 0.8, 3, "the student is the bottleneck"),
        (0.4, 0.02, 3, "raise teacher.replicas"),
        (0.4, 0.5, 1, "raise transport.ring_depth"),
        (0.4, 0.5, 4, "the links are the bottleneck"),
    ],
)
def test_the_bottleneck_is_named_with_what_to_change(stall, idle, depth, expected):
    line = name_bottleneck(stall, idle, depth)
    assert expected in line and bool(line) == bool(expected)
