"""What a student holds against a teacher: strikes, forwards that run too long, replies that it owes."""

import time
from types import SimpleNamespace

import pytest
import torch

from disaggkd_cli.transport import Identity, LinkLost, ProtocolError, StopReason, student_link
from disaggkd_cli.transport.ledger import OutgoingRequest
from disaggkd_cli.transport.payloads import HostPayloads
from disaggkd_cli.transport.protocol import Header, Kind
from disaggkd_cli.transport.slots import make_slots
from disaggkd_cli.transport.student_link import StudentLink, TeacherRecord, check_ready
from disaggkd_cli.wire import format_of

ROWS, WIDTH = 2, 3


class Owner:
    """Notes what a link says."""

    def __init__(self):
        self.identity = Identity("student 0")
        self.timeout = 10.0
        self.cuda = None
        self.delivered_tickets, self.rejected_tickets = [], []

    def next_link_number(self):
        return 1

    def delivered(self, link, ticket, seconds_per_work):
        assert seconds_per_work >= 0
        self.delivered_tickets.append(ticket)

    def rejected(self, link, outgoing, error):
        self.rejected_tickets.append(outgoing.ticket)


@pytest.fixture
def link():
    return StudentLink(Owner(), TeacherRecord(0, Identity("teacher 0")), store=None)


def reply(link, ticket, value=1.0):
    """Let a reply full of `value` arrive."""
    (slot,) = make_slots(1, 64)
    wire = format_of("float32")
    size = wire.payload_bytes(ROWS, WIDTH)
    wire.encode(torch.full((ROWS, WIDTH), value), slot.buffer[:size])
    ready = Header(Kind.READY, dtype=wire.code, ticket=ticket, rows=ROWS, width=WIDTH, body_bytes=size)
    outgoing = OutgoingRequest(SimpleNamespace(request_id=ticket), 4, None, None, ready, slot=slot, ticket=ticket)
    link._sent_at[ticket] = time.monotonic()
    link._verify(SimpleNamespace(payloads=HostPayloads(None), session=None), ready, outgoing)


def said(link):
    return [link.outbox.get() for _ in range(link.outbox.qsize())]


def test_the_second_bad_reply_ends_a_teachers_service(link):
    reply(link, 1, float("nan"))
    assert not said(link) and not link.record.blocked
    reply(link, 2)
    reply(link, 3, float("inf"))
    assert said(link) == [StopReason.QUARANTINED]
    assert "quarantined after 2 bad replies" in link.record.blocked
    assert link._owner.rejected_tickets == [1, 3] and link._owner.delivered_tickets == [2]


def test_a_strike_is_forgiven_after_so_many_good_replies_in_a_row(link, monkeypatch):
    monkeypatch.setattr(student_link, "FORGIVEN_AFTER", 3)
    reply(link, 1, float("nan"))
    for ticket in (2, 3):
        reply(link, ticket)
    assert link.record.strikes == 1
    reply(link, 4)
    assert link.record.strikes == 0
    reply(link, 5, float("nan"))
    assert not link.record.blocked


def test_good_replies_that_a_bad_one_interrupts_are_not_in_a_row(link, monkeypatch):
    monkeypatch.setattr(student_link, "FORGIVEN_AFTER", 3)
    monkeypatch.setattr(student_link, "STRIKES", 3)
    for value in (1.0, 1.0, float("nan"), 1.0, 1.0):
        reply(link, 1, value)
    assert link.record.strikes == 1


def owing(link, seconds):
    """The link has waited for a reply for so long."""
    link._sent_at[1] = link._last_reply = time.monotonic() - seconds


def test_an_idle_teacher_that_owes_a_reply_for_too_long_is_lost(link):
    owing(link, 11.0)
    with pytest.raises(LinkLost, match="says it is idle, but owes a reply for more than 10 s"):
        link._check_progress(Header(Kind.PING))


@pytest.mark.parametrize("ping", [Header(Kind.PING, busy_ms=9_000), Header(Kind.PING, queued=1)])
def test_a_teacher_at_work_may_owe_a_reply(link, ping):
    owing(link, 11.0)
    link._check_progress(ping)


def test_an_idle_teacher_may_owe_a_reply_for_a_while_and_owe_none_for_ever(link):
    owing(link, 9.0)
    link._check_progress(Header(Kind.PING))
    link._sent_at.clear()
    link._last_reply -= 1000
    link._check_progress(Header(Kind.PING))


def test_a_reply_that_is_on_its_way_late_is_counted_from_the_last_one(link):
    owing(link, 11.0)
    link._last_reply = time.monotonic()
    link._check_progress(Header(Kind.PING))


def test_a_forward_that_runs_too_long_loses_the_link(link):
    link._check_progress(Header(Kind.PING, busy_ms=10_000))
    with pytest.raises(LinkLost, match="one forward has been running for 10 s"):
        link._check_progress(Header(Kind.PING, busy_ms=10_001))


@pytest.mark.parametrize("field", ["request_id", "rows", "width", "dtype", "token_hash", "body_bytes"])
def test_a_ready_that_differs_in_any_field_is_refused_with_both_values(field):
    expected = Header(Kind.READY, request_id=7, rows=2, width=3, dtype=1, token_hash=9, body_bytes=12)
    check_ready(expected, expected)
    there = Header(Kind.READY, **{**vars_of(expected), field: 99})
    with pytest.raises(ProtocolError, match=f"request 7 announces {field.replace('_', ' ')} 99, the student expects"):
        check_ready(there, expected)


def vars_of(header):
    names = ("request_id", "rows", "width", "dtype", "token_hash", "body_bytes")
    return {name: getattr(header, name) for name in names}


def test_a_wrong_checksum_is_a_bad_reply_and_none_is_not(link):
    payload = torch.zeros(24, dtype=torch.uint8)
    header = Header(Kind.READY, dtype=3, rows=2, width=3, checksum=1)
    assert "checksum" in student_link.payload_problem(header, payload)
    assert student_link.payload_problem(Header(Kind.READY, dtype=3, rows=2, width=3), payload) == ""
