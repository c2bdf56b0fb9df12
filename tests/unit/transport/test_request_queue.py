"""The queue of a teacher under every schedule that hypothesis finds, and its turns in the cases that matter most."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from disaggkd_cli.transport.request_queue import PendingRequest, RequestQueue


def pending(link, number=0):
    return PendingRequest(link, header=None, request=number)


class QueueMachine(RuleBasedStateMachine):
    """Students that ask, take replies or do not, come and go; beside them a plain model of what must happen."""

    @initialize(credits=st.integers(1, 3), most=st.integers(1, 5))
    def begin(self, credits, most):
        self.queue = RequestQueue(credits, most)
        self.credits, self.most = credits, most
        self.links, self.names, self.asked = [], 0, 0
        self.waiting, self.replies = {}, {}
        self.passed_by = {}

    @rule()
    def join(self):
        link = self.names = self.names + 1
        self.queue.link_up(link)
        self.links.append(link)
        self.waiting[link], self.replies[link], self.passed_by[link] = [], set(), set()

    @precondition(lambda self: self.links)
    @rule(data=st.data())
    def leave(self, data):
        link = data.draw(st.sampled_from(self.links))
        self.links.remove(link)
        del self.waiting[link], self.replies[link], self.passed_by[link]
        self.queue.link_down(link)
        self.queue.link_down(link)
        with pytest.raises(KeyError):
            self.queue.push(pending(link))
        self.queue.reply_gone(link, 0)  # of a link that has gone: nothing happens

    @precondition(lambda self: self.links)
    @rule(data=st.data(), count=st.integers(1, 4))
    def ask(self, data, count):
        link = data.draw(st.sampled_from(self.links))
        for _ in range(count):
            self.queue.push(pending(link, self.asked))
            self.waiting[link].append(self.asked)
            self.asked += 1

    @rule()
    def serve(self):
        able = [link for link in self.links if self.waiting[link] and len(self.replies[link]) < self.credits]
        full = sum(map(len, self.replies.values())) >= self.most
        found = self.queue.next()
        if full or not able:
            assert found is None
            return
        assert found.link in able, "out of its own turn or beyond its credits"
        assert found.request == self.waiting[found.link].pop(0), "a link's requests keep their order"
        assert found.buffer in set(range(self.credits)) - self.replies[found.link], "a buffer still in use"
        self.replies[found.link].add(found.buffer)
        for link in self.links:
            if link == found.link or link not in able:
                self.passed_by[link] = set()
            else:
                assert found.link not in self.passed_by[link], "served twice while another could be served and was not"
                self.passed_by[link].add(found.link)

    @precondition(lambda self: any(self.replies.values()))
    @rule(data=st.data())
    def reply_taken(self, data):
        link = data.draw(st.sampled_from([link for link in self.links if self.replies[link]]))
        buffer = data.draw(st.sampled_from(sorted(self.replies[link])))
        self.replies[link].remove(buffer)
        self.queue.reply_gone(link, buffer)
        with pytest.raises(ValueError, match="not in use"):
            self.queue.reply_gone(link, buffer)

    @invariant()
    def counts_agree(self):
        if not hasattr(self, "queue"):
            return
        assert self.queue.links == tuple(self.links)
        assert self.queue.replies() == sum(map(len, self.replies.values())) <= max(self.most, 0)
        for link in self.links:
            assert self.queue.waiting(link) == len(self.waiting[link])
            assert self.queue.open_requests(link) == len(self.waiting[link]) + len(self.replies[link])

    def teardown(self):
        """Whatever happened, everything that waits is answered once replies are taken."""
        if not hasattr(self, "queue"):
            return
        for link in self.links:
            for buffer in self.replies[link]:
                self.queue.reply_gone(link, buffer)
        while (found := self.queue.next()) is not None:
            assert found.request == self.waiting[found.link].pop(0)
            self.queue.reply_gone(found.link, found.buffer)
        assert not any(self.waiting.values())


QueueMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestQueue = QueueMachine.TestCase


def queue_of(*backlogs, credits=2, most=8):
    """A queue with a link for each backlog, numbered from 0."""
    queue = RequestQueue(credits, most)
    for link, backlog in enumerate(backlogs):
        queue.link_up(link)
        for number in range(backlog):
            queue.push(pending(link, number))
    return queue


def turns(queue, count):
    """The links of the next turns, each reply taken at once."""
    served = []
    for _ in range(count):
        found = queue.next()
        served.append(found and found.link)
        if found is not None:
            queue.reply_gone(found.link, found.buffer)
    return served


def test_students_with_a_backlog_take_turns():
    assert turns(queue_of(3, 1, 3), 8) == [0, 1, 2, 0, 2, 0, 2, None]


def test_a_student_that_takes_no_replies_is_passed_over():
    queue = queue_of(3, 3, credits=1)
    assert [queue.next().link, queue.next().link] == [0, 1]
    queue.reply_gone(1, 0)
    assert queue.next().link == 1
    assert queue.next() is None


def test_each_link_has_as_many_replies_on_their_way_as_it_has_send_buffers():
    queue = queue_of(5, credits=2)
    assert [queue.next().buffer, queue.next().buffer, queue.next()] == [0, 1, None]


@pytest.mark.parametrize("most", [1, 3, 8])
def test_exactly_so_many_replies_are_computed_and_not_taken(most):
    queue = queue_of(*[2] * 6, most=most)
    served = []
    while (found := queue.next()) is not None:
        served.append(found)
    assert len(served) == queue.replies() == most
    queue.reply_gone(served[0].link, served[0].buffer)
    assert queue.next() is not None and queue.next() is None


def test_the_turn_after_a_link_that_left_is_its_successors():
    queue = queue_of(2, 2, 2)
    assert turns(queue, 2) == [0, 1]
    queue.link_down(1)
    assert turns(queue, 3) == [2, 0, 2]


def test_the_turn_goes_on_where_it_was_when_an_earlier_link_leaves():
    queue = queue_of(3, 3, 3)
    assert turns(queue, 2) == [0, 1]
    queue.link_down(0)
    assert turns(queue, 3) == [2, 1, 2]


def test_the_turn_begins_anew_when_all_have_left():
    queue = queue_of(1)
    assert turns(queue, 1) == [0]
    queue.link_down(0)
    queue.link_up(7)
    queue.push(pending(7))
    assert turns(queue, 1) == [7]


def test_a_student_that_joins_waits_no_longer_than_one_round():
    queue = queue_of(9, 9)
    assert turns(queue, 1) == [0]
    queue.link_up(2)
    queue.push(pending(2))
    assert turns(queue, 2) == [1, 2]


@pytest.mark.parametrize("credits, most", [(0, 8), (2, 0)])
def test_a_queue_without_credits_is_refused(credits, most):
    with pytest.raises(ValueError, match="answers nobody"):
        RequestQueue(credits, most)
