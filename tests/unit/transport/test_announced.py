"""Bad entries at the rendezvous are skipped and named; whoever is honest is found all the same."""

import json
from dataclasses import asdict

import pytest
import torch.distributed as dist

from disaggkd_cli.errors import RunError
from disaggkd_cli.transport import Identity, announced, open_store
from disaggkd_cli.transport.announced import Invitations, Roster
from disaggkd_cli.transport.rendezvous import (
    announce_teacher,
    changes_key,
    invitation_keys,
    invite_teacher,
    roster_version,
    student_end,
    teacher_key,
    teachers_key,
    withdraw_teacher,
)
from tests.unit.transport.test_exchange import exchange, ids_of, make_request, ring_over, wait_until  # noqa: F401

pytestmark = pytest.mark.timeout(60)
GARBAGE = [
    b"", b"not json", b"\xff\xfe", b"[]", b"[" * 10_000, b"{}", b'{"role": 3}', b"9" * 100_000,
    json.dumps({**asdict(Identity("t")), "protocol_version": 1}).encode(),
    json.dumps({**asdict(Identity("t")), "more": 1}).encode(),
    json.dumps(asdict(Identity("\x1b[31mred"))).encode(),
    json.dumps(asdict(Identity("x" * 2000))).encode(),
]  # fmt: skip


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def rendezvous():
    lines, clock, store = [], Clock(), dist.HashStore()
    return store, Roster(store, lines.append, clock), lines, clock


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_an_unreadable_teacher_is_skipped_and_named_once(rendezvous, garbage):
    store, roster, lines, _ = rendezvous
    announce_teacher(store, Identity("teacher 0"))
    store.set(teacher_key(announce_teacher(store, Identity("bad")), "identity"), garbage)
    announce_teacher(store, Identity("teacher 2"))
    for _ in range(3):
        assert {number: found.role for number, found in roster.read().items()} == {0: "teacher 0", 2: "teacher 2"}
    assert len(lines) == 1 and "teacher number 1 at the rendezvous is skipped" in lines[0]
    assert lines[0].isprintable()


def test_a_counter_beyond_belief_counts_again(rendezvous):
    store, roster, lines, _ = rendezvous
    announce_teacher(store, Identity("teacher 0"))
    roster.read()
    store.add(teachers_key(), 10**9)
    with pytest.raises(RunError, match="20000 at most"):
        announce_teacher(store, Identity("teacher 1"))
    assert list(roster.read()) == [0]
    assert announce_teacher(store, Identity("teacher 1")) == 1
    assert list(roster.read()) == [0, 1]
    assert len(lines) == 1 and "from 1 again" in lines[0]


def test_numbers_without_an_entry_keep_nobody_out_and_are_forgotten(rendezvous, monkeypatch):
    monkeypatch.setattr(announced, "MOST_NEW", 10)
    store, roster, _, clock = rendezvous
    store.add(teachers_key(), 25)
    announce_teacher(store, Identity("teacher 25"))
    found = [list(roster.read()) for _ in range(3)]
    assert found == [[], [], [25]] and not roster.is_complete
    clock.now = 11.0
    roster.read()
    assert roster.is_complete and list(roster.read()) == [25]


def test_an_entry_that_follows_its_number_late_is_read(rendezvous):
    store, roster, _, clock = rendezvous
    store.add(teachers_key(), 1)
    assert roster.read() == {} and not roster.is_complete
    clock.now = 5.0
    store.set(teacher_key(0, "identity"), Identity("teacher 0").encode())
    assert list(roster.read()) == [0] and roster.is_complete


def test_a_teacher_that_withdrew_is_gone(rendezvous):
    store, roster, *_ = rendezvous
    announce_teacher(store, Identity("teacher 0"))
    assert list(roster.read()) == [0]
    withdraw_teacher(store, 0)
    assert roster.read() == {}
    announce_teacher(store, Identity("teacher 1"))
    withdraw_teacher(store, 1)
    assert roster.read() == {}


@pytest.mark.parametrize("key", [teachers_key(), changes_key()])
def test_a_counter_that_is_no_number_counts_again(key):
    store = open_store("127.0.0.1:0", host_it=True)
    lines = []
    roster = Roster(store.clone(), lines.append)
    announce_teacher(store, Identity("teacher 0"))
    assert list(roster.read()) == [0]
    store.set(key, "text")
    with pytest.raises(RuntimeError):
        (roster_version(roster.store), roster.read())
    roster.repair(store.clone())
    assert announce_teacher(store, Identity("teacher 1")) == 1
    assert roster_version(roster.store) >= 0
    assert list(roster.read()) == [0, 1]
    assert lines == [line for line in lines if "held no number" in line] and len(lines) == 1


def test_unreadable_and_missing_invitations_do_not_keep_later_ones_out():
    store, lines, clock = dist.HashStore(), [], Clock()
    invitations = Invitations(store, 0, lines.append, clock)
    assert invitations.next() is None
    assert invite_teacher(store, 0, Identity("student 0")) == 1
    store.set(invitation_keys(0, invite_teacher(store, 0, Identity("student 1")))[1], b"garbage")
    store.add(invitation_keys(0, 0)[0], 1)
    assert invite_teacher(store, 0, Identity("student 3")) == 4
    assert invitations.next() == invitations.next() == (1, Identity("student 0"))
    invitations.answered(1)
    assert invitations.next() is None and len(lines) == 1 and "invitation 2" in lines[0]
    clock.now = 11.0
    assert invitations.next() == (4, Identity("student 3"))
    invitations.answered(4)
    assert invitations.next() is None


@pytest.mark.parametrize(
    ("word", "found"), [(b"finished", "finished"), (b"stopped", "stopped"), (b"\xff", ""), (b"x", "")]
)
def test_only_known_words_end_a_teacher(word, found):
    store = dist.HashStore()
    store.set("disaggkd/student/ended", word)
    assert student_end(store) == found


def test_a_run_finds_its_teachers_among_bad_entries(exchange):  # noqa: F811
    store = exchange.store
    for garbage in (b"garbage", b"\xff" * 50_000):
        number = store.add(teachers_key(), 1) - 1
        store.set(teacher_key(number, "identity"), garbage)
    store.add(changes_key(), 1)
    pool = exchange.pool()
    exchange.teacher("teacher 0")
    assert ids_of(ring_over(pool, [make_request(n) for n in range(5)])) == list(range(5))
    store.set(changes_key(), "no number")
    wait_until(lambda: any("held no number as disaggkd/changes" in line for line in pool.events))
    exchange.teacher("teacher 1")
    wait_until(lambda: pool.teachers == 2)
    assert sum("is skipped" in line for line in pool.events) == 2
