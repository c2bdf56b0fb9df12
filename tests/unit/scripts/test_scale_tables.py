"""The counts behind docs/scale.md follow the transport's own constants."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from disaggkd_cli.transport import discovery, neighbours, rendezvous, request_queue, server

SCRIPT = Path(__file__).parents[3] / "scripts" / "scale_tables.py"


@pytest.fixture(scope="module")
def scale_tables():
    specification = importlib.util.spec_from_file_location("scale_tables", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_constants_are_those_of_the_transport(scale_tables):
    assert scale_tables.DISCOVERY_SECONDS == discovery._DISCOVERY_SECONDS
    assert scale_tables.WATCH_SECONDS == server._WATCH_SECONDS
    assert scale_tables.HEARTBEAT_SECONDS == rendezvous.HEARTBEAT_SECONDS
    assert scale_tables.LOOK_SECONDS == neighbours.LOOK_SECONDS
    assert scale_tables.SEND_BUFFERS == request_queue.SEND_BUFFERS
    assert scale_tables.LOOKS_PER_SECOND == neighbours.LOOKS_PER_SECOND
    assert scale_tables.MOST_REPLIES == request_queue.MOST_REPLIES


def test_few_links_serve_nearly_as_well_as_all(scale_tables):
    speeds = {most: scale_tables.bounded(60, 8, most, 120, lost=0) for most in (1, 4, 8)}
    assert speeds[4] > 0.98 * speeds[8]
    assert speeds[1] <= speeds[4] * 1.01
    assert scale_tables.bounded(60, 8, 1, 120, lost=1) == 0.0, "whose only teacher is gone waits for ever"
    assert scale_tables.bounded(60, 8, 2, 120, lost=1) == pytest.approx(7 / 8 / 0.97, rel=0.03)
