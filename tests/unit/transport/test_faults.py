"""Faults happen in tests only, and where they were ordered."""

from types import SimpleNamespace

import pytest
import torch

from disaggkd_cli.transport.faults import Faults
from disaggkd_cli.transport.protocol import Header, Kind


def test_without_the_testing_switch_nothing_ever_happens(monkeypatch):
    monkeypatch.delenv("DISAGGKD_TESTING", raising=False)
    monkeypatch.setenv("DISAGGKD_FAULT", "teacher 0.forward:raise,teacher 0.payload:flip,teacher 0.ready:rows")
    faults = Faults("teacher 0")
    hidden, payload, header = torch.ones(2, 2), torch.zeros(4, dtype=torch.uint8), Header(Kind.READY)
    assert faults.at_forward(hidden) is hidden and faults.at_payload(payload, None) is payload
    assert faults.at_ready(header) == header


def test_a_fault_happens_to_its_role_at_its_visit_only(monkeypatch):
    monkeypatch.setenv("DISAGGKD_TESTING", "1")
    monkeypatch.setenv("DISAGGKD_FAULT", "checkpoint:kill@3,teacher 1.payload:flip@2,teacher 1.forward:raise@2")
    payload = torch.zeros(5, dtype=torch.uint8)
    bystander, victim = Faults("teacher 11"), Faults("teacher 1")
    gone = []
    ready = SimpleNamespace(wait=lambda: gone.append("ready"))
    assert [int(bystander.at_payload(payload, ready).sum()) for _ in range(3)] == [0, 0, 0]
    assert not gone
    assert [int(victim.at_payload(payload, ready).sum()) for _ in range(3)] == [0, 4, 0]
    assert gone == ["ready"]
    victim.at_forward(payload)
    with pytest.raises(RuntimeError, match="ordered by the test"):
        victim.at_forward(payload)
