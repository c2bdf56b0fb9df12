"""The ledger under every schedule that hypothesis finds: nothing lost, nothing twice, never more than depth."""

from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from disaggkd_cli.transport.errors import StaleReply
from disaggkd_cli.transport.ledger import Ledger, OutgoingRequest, State


def outgoing(number, work=10):
    request = SimpleNamespace(request_id=number)
    return OutgoingRequest(request, work, header=None, body=None, ready=None)


OPEN = (State.REQUESTED, State.RECEIVING)


class LedgerMachine(RuleBasedStateMachine):
    """A consumer, a feeder and up to four links that deliver, repeat themselves, come late, die and return."""

    @initialize(depth=st.integers(1, 4))
    def begin(self, depth):
        self.depth = depth
        self.saved_cursor = 0
        self.trained = []
        self.links = set()
        self.start_student()

    def start_student(self):
        """A fresh student process that resumes from its checkpoint: all links are new, the ledger is empty."""
        self.ledger = Ledger()
        self.consumer = self.ledger.open_consumer(range(self.depth))
        self.next_request = self.saved_cursor
        self.entries = {}
        self.on_link = {}
        self.closed_tickets = []  # a new process has new links, over which the old ones' tickets never come
        self.in_use = []
        self.slot_owner = {}
        self.links = set()
        del self.trained[self.saved_cursor :]

    @rule(rows=st.integers(0, 3))
    def admit(self, rows):
        if not self.ledger.has_credit(self.consumer):
            return
        entry = outgoing(self.next_request, 10 + rows)
        self.ledger.admit(self.consumer, entry, needs_slot=rows > 0)
        self.next_request += 1
        if entry.slot is not None:
            assert entry.slot not in self.slot_owner, "a slot was handed out twice"
            self.slot_owner[entry.slot] = entry.request_id
        self.entries[entry.request_id] = entry

    @rule()
    def dispatch(self):
        entry = self.ledger.assign()
        if entry is not None:
            assert entry.link in self.links
            older = [e for e in self.entries.values() if e.state is State.WAITING and e.order < entry.order]
            assert not older, "a younger request went out before an older one"
            self.on_link[entry.ticket] = (entry.link, entry)

    @precondition(lambda self: any(e.state is State.REQUESTED for _, e in self.on_link.values()))
    @rule(data=st.data(), good=st.booleans(), finish=st.booleans())
    def reply(self, data, good, finish):
        ready = sorted(t for t, (_, e) in self.on_link.items() if e.state is State.REQUESTED)
        ticket = data.draw(st.sampled_from(ready))
        link, entry = self.on_link[ticket]
        assert self.ledger.arriving(link, ticket) is entry
        assert entry.state is State.RECEIVING
        if finish:
            self.finish(ticket, good)

    @precondition(lambda self: any(e.state is State.RECEIVING for _, e in self.on_link.values()))
    @rule(data=st.data(), good=st.booleans())
    def payload_over(self, data, good):
        receiving = sorted(t for t, (_, e) in self.on_link.items() if e.state is State.RECEIVING)
        self.finish(data.draw(st.sampled_from(receiving)), good)

    def finish(self, ticket, good):
        link, entry = self.on_link.pop(ticket)
        (self.ledger.delivered if good else self.ledger.rejected)(link, ticket)
        assert entry.state is (State.READY if good else State.WAITING)
        if good:
            self.ledger.measured(link, 0.5 + link)
        self.closed_tickets.append((link, ticket))

    @precondition(lambda self: self.closed_tickets)
    @rule(data=st.data())
    def late_or_repeated_reply(self, data):
        link, ticket = data.draw(st.sampled_from(self.closed_tickets))
        with pytest.raises(StaleReply):
            self.ledger.arriving(link, ticket)
        with pytest.raises(StaleReply):
            self.ledger.delivered(link, ticket)

    @precondition(lambda self: any(e.state in OPEN for _, e in self.on_link.values()))
    @rule(data=st.data())
    def reply_over_the_wrong_link(self, data):
        ticket = data.draw(st.sampled_from(sorted(self.on_link)))
        link, entry = self.on_link[ticket]
        state = entry.state
        with pytest.raises(StaleReply):
            self.ledger.arriving(link + 1000, ticket)
        assert entry.state is state

    @rule(link=st.integers(0, 3))
    def join(self, link):
        if link not in self.links:
            self.links.add(link)
            self.ledger.link_up(link, f"teacher {link % 2}")

    @precondition(lambda self: self.links)
    @rule(data=st.data())
    def die(self, data):
        link = data.draw(st.sampled_from(sorted(self.links)))
        self.links.remove(link)
        orphans = self.ledger.link_down(link)
        lost = [ticket for ticket, (owner, _) in self.on_link.items() if owner == link]
        assert sorted(e.request_id for e in orphans) == sorted(self.on_link[t][1].request_id for t in lost)
        for ticket in lost:
            assert self.on_link.pop(ticket)[1].state is State.WAITING
            self.closed_tickets.append((link, ticket))

    @rule()
    def train_on_next(self):
        entry = self.ledger.take(self.consumer)
        if entry is not None:
            assert entry.request_id == len(self.trained), "out of order, lost or repeated"
            self.trained.append(entry.request_id)
            self.in_use.append(entry)

    @precondition(lambda self: self.in_use)
    @rule(data=st.data())
    def release(self, data):
        entry = self.in_use.pop(data.draw(st.integers(0, len(self.in_use) - 1)))
        self.ledger.release(entry)
        self.ledger.release(entry)
        if entry.slot is not None:
            del self.slot_owner[entry.slot]

    @rule()
    def save(self):
        self.saved_cursor = len(self.trained)

    @rule()
    def crash_and_resume(self):
        self.start_student()

    @invariant()
    def never_more_than_depth(self):
        if not hasattr(self, "ledger"):
            return
        assert self.ledger.occupied(self.consumer) == len(self.slot_owner) <= self.depth
        assert len(self.on_link) <= self.depth
        assert sum(self.ledger.outstanding(link) for link in self.links) == len(self.on_link)
        assert self.trained == list(range(len(self.trained)))

    def teardown(self):
        """Whatever happened, one healthy link finishes everything that was admitted."""
        if not hasattr(self, "ledger"):
            return
        for link in sorted(self.links):
            self.ledger.link_down(link)
        self.ledger.link_up(99, "teacher 99")
        for entry in self.in_use:
            self.ledger.release(entry)
        while (entry := self.ledger.assign()) is not None:
            self.ledger.arriving(99, entry.ticket)
            self.ledger.delivered(99, entry.ticket)
        while (entry := self.ledger.take(self.consumer)) is not None:
            self.trained.append(entry.request_id)
            self.ledger.release(entry)
        assert self.trained == list(range(self.next_request))
        assert self.ledger.occupied(self.consumer) == 0


LedgerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestLedger = LedgerMachine.TestCase


def ledger_with(depth, links):
    ledger = Ledger()
    consumer = ledger.open_consumer(range(depth))
    for link in links:
        ledger.link_up(link, f"teacher {link}")
    return ledger, consumer


def assign_all(ledger):
    assigned = []
    while (entry := ledger.assign()) is not None:
        assigned.append(entry)
    return assigned


def test_requests_go_to_the_link_with_the_least_work_outstanding():
    ledger, consumer = ledger_with(6, [0, 1])
    for number, work in enumerate([100, 10, 10, 10, 100]):
        ledger.admit(consumer, outgoing(number, work))
    assert [entry.link for entry in assign_all(ledger)] == [0, 1, 1, 1, 1]


def test_a_link_measured_as_slow_gets_fewer_requests():
    ledger, consumer = ledger_with(8, [0, 1])
    ledger.measured(0, 3.0)
    ledger.measured(1, 1.0)
    for number in range(8):
        ledger.admit(consumer, outgoing(number))
    assert sum(entry.link == 0 for entry in assign_all(ledger)) == 2


def test_a_request_answered_badly_goes_before_younger_ones():
    ledger, consumer = ledger_with(4, [0])
    first = outgoing(0)
    ledger.admit(consumer, first)
    ledger.assign()
    for number in (1, 2):
        ledger.admit(consumer, outgoing(number))
    ledger.arriving(0, first.ticket)
    ledger.rejected(0, first.ticket)
    assert [entry.request_id for entry in assign_all(ledger)] == [0, 1, 2]


def test_a_bad_reply_is_asked_for_again_elsewhere_when_there_is_an_elsewhere():
    ledger, consumer = ledger_with(1, [0, 1])
    entry = outgoing(0)
    ledger.admit(consumer, entry)
    for expected in (0, 1, 0):
        assert ledger.assign().link == expected
        ledger.arriving(entry.link, entry.ticket)
        ledger.rejected(entry.link, entry.ticket)
    assert entry.rejections == 3 and entry.rejected_by == {"teacher 0", "teacher 1"}
    ledger.link_up(2, "teacher 0")  # the same teacher, started again
    ledger.link_up(3, "teacher 3")
    assert ledger.assign().link == 3


def test_a_measured_speed_is_smoothed_over_about_five_replies():
    """One slow reply moves a link's share by a fifth, and not at all where the next ones are as fast as ever."""
    ledger, consumer = ledger_with(4, [0, 1])
    for _ in range(20):
        ledger.measured(0, 1.0)
        ledger.measured(1, 1.0)
    ledger.measured(0, 6.0)  # now 2.0: link 1 may take two of the same size before link 0 takes one
    for number in range(4):
        ledger.admit(consumer, outgoing(number))
    assert [entry.link for entry in assign_all(ledger)] == [1, 0, 1, 1]
    assert ledger.speed(0) == pytest.approx(0.8 * 1.0 + 0.2 * 6.0)
    for _ in range(5):
        ledger.measured(0, 1.0)
    assert ledger.speed(0) == pytest.approx(1.0 + 0.8**5)


def test_requests_of_a_lost_link_go_out_again_before_younger_ones_and_in_their_order():
    ledger, consumer = ledger_with(6, [0, 1])
    for number in range(4):
        ledger.admit(consumer, outgoing(number))
    sent = assign_all(ledger)
    assert [entry.link for entry in sent] == [0, 1, 0, 1]
    ledger.link_down(1)
    ledger.link_down(0)
    for number in (4, 5):
        ledger.admit(consumer, outgoing(number))
    ledger.link_up(2, "teacher 2")
    assert [entry.request_id for entry in assign_all(ledger)] == [0, 1, 2, 3, 4, 5]


def test_only_what_lies_ready_is_counted_as_ready():
    ledger, consumer = ledger_with(4, [0])
    for number in range(4):
        ledger.admit(consumer, outgoing(number))
    sent = [ledger.assign() for _ in range(3)]
    for entry in sent[:2]:
        ledger.arriving(0, entry.ticket)
    ledger.delivered(0, sent[0].ticket)
    assert [ledger.count(consumer, state) for state in list(State)[:4]] == [1, 1, 1, 1]
    assert ledger.count(consumer, State.READY) == 1


def test_a_consumer_is_finished_when_nothing_more_comes_and_all_is_taken():
    ledger, consumer = ledger_with(2, [0])
    ledger.admit(consumer, outgoing(0), needs_slot=False)
    assert not ledger.is_finished(consumer)
    ledger.complete(consumer)
    assert not ledger.is_finished(consumer)
    ledger.take(consumer)
    assert ledger.is_finished(consumer)


def test_a_run_of_requests_without_rows_is_pulled_no_further_than_depth():
    ledger, consumer = ledger_with(2, [])
    for number in range(2):
        assert ledger.has_credit(consumer)
        ledger.admit(consumer, outgoing(number), needs_slot=False)
    assert not ledger.has_credit(consumer)
    assert ledger.take(consumer).request_id == 0
    assert ledger.has_credit(consumer)


def test_two_consumers_keep_their_own_slots_and_order():
    ledger, training = ledger_with(1, [0])
    evaluation = ledger.open_consumer([0])
    ledger.admit(training, outgoing(5))
    ledger.admit(evaluation, outgoing(5))
    assert not ledger.has_credit(training) and not ledger.has_credit(evaluation)
    for entry in assign_all(ledger):
        ledger.arriving(0, entry.ticket)
        ledger.delivered(0, entry.ticket)
    ledger.release(ledger.take(evaluation))
    assert ledger.has_credit(evaluation) and not ledger.has_credit(training)


def test_closing_a_consumer_drops_what_waits_and_ignores_what_still_arrives():
    ledger, consumer = ledger_with(2, [0])
    sent = outgoing(0)
    ledger.admit(consumer, sent)
    ledger.assign()
    ledger.link_down(0)
    ledger.link_up(0, "teacher 0")
    ledger.assign()
    ledger.admit(consumer, outgoing(1))
    ledger.close_consumer(consumer)
    assert ledger.assign() is None
    assert ledger.arriving(0, sent.ticket).state is State.DROPPED
    ledger.delivered(0, sent.ticket)
    assert ledger.outstanding(0) == 0
    assert ledger.link_down(0) == []


def test_a_ring_has_at_least_one_slot():
    with pytest.raises(ValueError, match="at least one"):
        Ledger().open_consumer([])
