"""Teachers and student ranks as threads of one process, over real gloo links on loopback."""

import threading
import time

import pytest
import torch

from disaggkd_cli.errors import DisaggkdError, RunError
from disaggkd_cli.transport import (
    HiddenStateRing,
    Identity,
    IncompatiblePeer,
    Request,
    RequestsExhausted,
    StopReason,
    TeacherPool,
    TeachersLost,
    open_store,
    serve,
)

pytestmark = pytest.mark.timeout(60)
WIDTH = 6


def make_request(number, rows=5, sequence=8):
    ids = torch.full((2, sequence), number, dtype=torch.int32)
    lengths = torch.tensor([sequence, sequence], dtype=torch.int32)
    return Request(number, ids, lengths, torch.arange(rows, dtype=torch.int32))


def hidden_of(request):
    return (request.input_ids.reshape(-1)[request.rows.long()] % 64).float()[:, None].expand(-1, WIDTH).contiguous()


class Exchange:
    """A store, and whatever teachers and pools a test starts; `close` ends them all."""

    def __init__(self):
        self.store = open_store("127.0.0.1:0", host_it=True)
        self.endpoint = f"127.0.0.1:{self.store.port}"
        self.stops, self.threads, self.pools, self.served, self.lines = [], [], [], {}, []

    def teacher(self, role="teacher 0", forward=hidden_of, fingerprint="f", dtype="bfloat16", probe="", **options):
        stop = threading.Event()
        identity = Identity(role, fingerprint, hidden_size=WIDTH, wire_dtype=dtype, probe=probe)
        settings = {"timeout": 5, "student_wait": 20, "stop": stop, "on_event": self.lines.append, **options}

        def run():
            try:
                self.served[role] = serve(
                    lambda: open_store(self.endpoint, host_it=False, timeout=5), identity, forward, **settings
                )
            except DisaggkdError as error:
                self.served[role] = error

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self.stops.append(stop)
        self.threads.append(thread)
        return stop, thread

    def pool(self, rank=0, fingerprint="f", dtype="bfloat16", run_id="r", **options):
        identity = Identity(f"student {rank}", fingerprint, hidden_size=WIDTH, wire_dtype=dtype, run_id=run_id)
        settings = {"timeout": 5, "teacher_wait": 10, "leader": rank == 0, "on_event": self.lines.append}
        settings |= {"rank": rank, **options}
        self.pools.append(TeacherPool(self.store, identity, **settings))
        return self.pools[-1]

    def close(self):
        for pool in reversed(self.pools):
            pool.close()
        for stop in self.stops:
            stop.set()
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive(), "a teacher did not end"


@pytest.fixture
def exchange():
    made = Exchange()
    yield made
    made.close()


def ring_over(pool, requests, depth=3, dtype="bfloat16", slot_rows=16):
    return HiddenStateRing(iter(requests), depth, slot_rows, WIDTH, dtype, pool)


def ids_of(ring):
    taken = []
    for lease in ring:
        expected = hidden_of(lease.request).to(lease.hidden.dtype)
        assert torch.equal(lease.hidden, expected)
        taken.append(lease.request_id)
        lease.release()
    return taken


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8"])
def test_hidden_states_arrive_in_order_in_every_dtype_and_depth(exchange, depth, dtype):
    exchange.teacher(dtype=dtype)
    pool = exchange.pool(dtype=dtype)
    ring = ring_over(pool, [make_request(n, rows=n % 6) for n in range(20)], depth, dtype)
    taken = []
    for lease in ring:
        assert lease.hidden.shape == (lease.request_id % 6, WIDTH)
        assert torch.allclose(lease.hidden.float(), hidden_of(lease.request), rtol=0.07)
        taken.append(lease.request_id)
        lease.release()
    assert taken == list(range(20))


@pytest.mark.parametrize("at_once", [2, 3])
def test_forwards_that_run_at_once_answer_in_any_order(exchange, at_once):
    together = threading.Barrier(at_once)

    def forward(request):
        together.wait(10)  # passes only when so many are inside at the same time
        time.sleep(0.002 * (request.request_id % 3))
        return hidden_of(request)

    exchange.teacher(forward=forward, at_once=at_once)
    ring = ring_over(exchange.pool(), [make_request(n) for n in range(8 * at_once)], depth=at_once)
    assert ids_of(ring) == list(range(8 * at_once))


def test_a_helper_that_breaks_ends_the_server(exchange):
    def forward(request):
        if threading.current_thread().name.startswith("answers"):
            raise SystemExit("no Exception")  # which a thread takes quietly
        time.sleep(0.05)
        return hidden_of(request)

    _, thread = exchange.teacher(forward=forward, at_once=2, student_wait=1)
    with pytest.raises(TeachersLost):
        ids_of(ring_over(exchange.pool(teacher_wait=1), [make_request(n) for n in range(40)]))
    thread.join(10)
    assert not thread.is_alive()


def test_inference_tensors_in_the_wire_dtype_are_sent_as_they_lie(exchange):
    exchange.teacher(forward=torch.inference_mode()(lambda request: hidden_of(request).bfloat16()))
    assert ids_of(ring_over(exchange.pool(), [make_request(n, rows=n) for n in range(12)])) == list(range(12))


def test_a_store_with_prefixes_around_it_will_do(exchange):
    exchange.store = torch.distributed.PrefixStore("attempt/3", exchange.store)
    pool = exchange.pool()
    identity = Identity("teacher 0", "f", hidden_size=WIDTH)
    run = threading.Thread(target=serve, args=(lambda: exchange.store.clone(), identity, hidden_of))
    run.start()
    assert ids_of(ring_over(pool, [make_request(n) for n in range(5)])) == list(range(5))
    pool.close()
    run.join(10)
    assert not run.is_alive()


def test_a_request_without_rows_never_reaches_a_teacher(exchange):
    seen = []
    exchange.teacher(forward=lambda request: (seen.append(request.request_id), hidden_of(request))[1])
    ring = ring_over(exchange.pool(), [make_request(n, rows=0 if n % 2 else 3) for n in range(10)])
    assert ids_of(ring) == list(range(10))
    assert sorted(seen) == [0, 2, 4, 6, 8]


def test_requests_without_any_row_need_no_teacher(exchange):
    ring = ring_over(exchange.pool(), [make_request(n, rows=0) for n in range(7)], depth=2)
    assert ids_of(ring) == list(range(7))


def test_never_more_than_depth_requests_are_pulled_ahead(exchange):
    pulled, taken = [], 0

    def requests():
        for number in range(12):
            pulled.append(number)
            yield make_request(number)

    exchange.teacher()
    ring = HiddenStateRing(requests(), 3, 16, WIDTH, "bfloat16", exchange.pool())
    for lease in ring:
        time.sleep(0.02)
        assert len(pulled) <= taken + 3
        taken += 1
        lease.release()
    assert taken == 12


def test_teacher_and_student_work_at_the_same_time(exchange):
    """With depth 2 the teacher's forward of the next request runs while the student holds a lease."""
    student_holds, overlapped = threading.Event(), []

    def forward(request):
        if request.request_id == 2:
            overlapped.append(student_holds.wait(10))
        return hidden_of(request)

    exchange.teacher(forward=forward)
    ring = ring_over(exchange.pool(), [make_request(n) for n in range(4)], depth=2)
    first, second = ring.take(), ring.take()
    student_holds.set()
    first.release()
    third = ring.take()
    assert (second.request_id, third.request_id, overlapped) == (1, 2, [True])


def test_many_student_ranks_and_teachers(exchange):
    for number in range(2):
        exchange.teacher(f"teacher {number}")
    pools = [exchange.pool(rank) for rank in range(3)]
    results = {}

    def consume(rank):
        pools[rank].wait_for_teacher()
        results[rank] = ids_of(ring_over(pools[rank], [make_request(n) for n in range(rank, 60, 3)]))

    threads = [threading.Thread(target=consume, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {rank: list(range(rank, 60, 3)) for rank in range(3)}


def test_two_rings_share_a_pool(exchange):
    exchange.teacher()
    pool = exchange.pool()
    training = ring_over(pool, [make_request(n) for n in range(10)], depth=2)
    first = training.take()
    evaluation = ring_over(pool, [make_request(n) for n in range(100, 105)], depth=2)
    assert ids_of(evaluation) == list(range(100, 105))
    evaluation.close()
    first.release()
    assert ids_of(training) == list(range(1, 10))


def test_a_teacher_that_joins_later_takes_its_share(exchange):
    served = []
    exchange.teacher("teacher 0", forward=lambda request: (served.append(0), hidden_of(request))[1])
    pool = exchange.pool()
    ring = ring_over(pool, [make_request(n) for n in range(200)], depth=4)
    for _ in range(5):
        ring.take().release()
    exchange.teacher("teacher 1", forward=lambda request: (served.append(1), hidden_of(request))[1])
    wait_until(lambda: pool.teachers == 2)
    assert ids_of(ring) == list(range(5, 200))
    assert served.count(1) > 20


def test_a_teacher_that_is_told_to_stop_leaves_without_losing_a_request(exchange):
    stop, _ = exchange.teacher("teacher 0")
    exchange.teacher("teacher 1")
    pool = exchange.pool()
    wait_until(lambda: pool.teachers == 2)
    ring = ring_over(pool, [make_request(n) for n in range(100)])
    for number in range(100):
        lease = ring.take()
        assert lease.request_id == number
        lease.release()
        if number == 20:
            stop.set()
    wait_until(lambda: "teacher 0" in exchange.served)
    assert exchange.served["teacher 0"].reason == "told to stop"


def test_the_student_that_finishes_ends_its_teachers(exchange):
    exchange.teacher("teacher 0")
    exchange.teacher("teacher 1", fingerprint="another model")
    pool = exchange.pool()
    assert ids_of(ring_over(pool, [make_request(n) for n in range(5)])) == list(range(5))
    pool.close(StopReason.FINISHED)
    wait_until(lambda: len(exchange.served) == 2)
    assert {served.reason for served in exchange.served.values()} == {"finished"}


def test_a_student_that_stopped_and_can_resume_says_so(exchange):
    exchange.teacher()
    pool = exchange.pool()
    pool.wait_for_teacher()
    pool.close(StopReason.STOPPED)
    wait_until(lambda: exchange.served)
    assert exchange.served["teacher 0"].reason == "stopped"


def test_a_teacher_without_a_student_ends_after_its_wait(exchange):
    exchange.teacher(student_wait=0.5)
    wait_until(lambda: exchange.served)
    assert exchange.served["teacher 0"].reason == "student vanished"


def test_without_a_teacher_the_wait_is_bounded_and_says_why(exchange):
    pool = exchange.pool(teacher_wait=0.5)
    with pytest.raises(TeachersLost, match=r"transport.teacher_wait=0.5.*none ever announced"):
        pool.wait_for_teacher()
    ring = ring_over(pool, [make_request(0)])
    with pytest.raises(TeachersLost):
        ring.take()


@pytest.mark.parametrize(("field", "value"), [("fingerprint", "abc"), ("dtype", "float16")])
def test_a_teacher_that_does_not_belong_is_refused_with_both_values(exchange, monkeypatch, field, value):
    monkeypatch.setattr("disaggkd_cli.transport.pool.REFUSAL_GRACE_SECONDS", 0.3)
    exchange.teacher(**{field: value})
    pool = exchange.pool()
    with pytest.raises(IncompatiblePeer, match=f"student 0 has .*, teacher 0 has {value}"):
        pool.wait_for_teacher()


def test_a_teacher_that_does_not_belong_does_not_keep_a_fitting_one_out(exchange):
    exchange.teacher("teacher 0", fingerprint="another model")
    exchange.teacher("teacher 1")
    pool = exchange.pool()
    assert ids_of(ring_over(pool, [make_request(n) for n in range(5)])) == list(range(5))
    wait_until(lambda: any("refused teacher 0" in line for line in exchange.lines))
    assert pool.teachers == 1


def test_a_forward_that_raises_once_is_asked_again(exchange):
    failures = []

    def forward(request):
        if request.request_id == 3 and not failures:
            failures.append(1)
            raise RuntimeError("out of memory, once")
        return hidden_of(request)

    exchange.teacher(forward=forward)
    pool = exchange.pool()
    assert ids_of(ring_over(pool, [make_request(n) for n in range(8)])) == list(range(8))
    assert any("out of memory, once" in line for line in pool.events)


def test_a_request_that_fails_everywhere_ends_the_run_with_the_cause(exchange):
    def forward(request):
        if request.request_id == 3:
            return hidden_of(request) * float("nan")
        return hidden_of(request)

    for number in range(3):
        exchange.teacher(f"teacher {number}", forward=forward)
    pool = exchange.pool()
    wait_until(lambda: pool.teachers == 3)
    ring = ring_over(pool, [make_request(n) for n in range(8)])
    with pytest.raises(RunError, match="request 3.*not finite"):
        ids_of(ring)


def test_one_faulty_teacher_does_not_fail_a_run_that_has_an_honest_one(exchange):
    """However often it comes back: what one teacher alone answers badly speaks against that teacher."""
    for _ in range(2):
        exchange.teacher("teacher 0", forward=lambda request: hidden_of(request) * float("nan"))
    pool = exchange.pool()
    wait_until(lambda: pool.teachers == 2)
    ring = ring_over(pool, [make_request(n) for n in range(8)])
    wait_until(lambda: pool.teachers == 0, seconds=20)  # four bad replies, and both are quarantined
    exchange.teacher("teacher 1")
    assert ids_of(ring) == list(range(8))
    assert sum("bad reply" in line for line in pool.events) >= 4


def test_what_the_only_teacher_answers_badly_fails_the_run_once_nobody_else_came(exchange):
    bad = 0

    def forward(request):
        nonlocal bad
        bad += request.request_id == 1
        if request.request_id == 1 and bad > 1:
            time.sleep(0.6)
        return hidden_of(request) * (float("nan") if request.request_id == 1 else 1)

    exchange.teacher("teacher 0", forward=forward)
    ring = ring_over(exchange.pool(teacher_wait=0.5), [make_request(n) for n in range(3)])
    with pytest.raises(RunError, match="request 1 was answered badly 2 times, by teacher 0.*not finite"):
        ids_of(ring)


def test_a_teacher_whose_forwards_all_fail_gives_up(exchange):
    def forward(request):
        raise RuntimeError("broken for good")

    exchange.teacher(forward=forward)
    pool = exchange.pool(teacher_wait=1)
    ring = ring_over(pool, [make_request(n) for n in range(4)], depth=4)
    with pytest.raises(RunError):
        ring.take()
    wait_until(lambda: exchange.served)
    assert "broken for good" in str(exchange.served["teacher 0"])


def test_what_the_iterator_raises_reaches_the_trainer(exchange):
    def requests():
        yield make_request(0)
        raise ZeroDivisionError("the data broke")

    exchange.teacher()
    ring = HiddenStateRing(requests(), 2, 16, WIDTH, "bfloat16", exchange.pool())
    with pytest.raises(ZeroDivisionError, match="the data broke"):
        ring.take().release()
        ring.take()


def test_a_request_larger_than_a_slot_is_an_error_that_says_so(exchange):
    exchange.teacher()
    ring = ring_over(exchange.pool(), [make_request(0, rows=9)], slot_rows=8)
    with pytest.raises(RunError, match="request 0 has 9 rows, a slot holds 8"):
        ring.take()


def test_the_end_of_the_requests_and_a_closed_ring_are_told_apart(exchange):
    exchange.teacher()
    pool = exchange.pool()
    ring = ring_over(pool, [make_request(0)])
    ring.take().release()
    with pytest.raises(RequestsExhausted):
        ring.take()
    ring.close()
    ring.close()
    with pytest.raises(RunError, match="ring is closed"):
        ring.take()


def test_figures_add_up(exchange):
    exchange.teacher()
    pool = exchange.pool()
    ring = ring_over(pool, [make_request(n) for n in range(10)])
    ids_of(ring)
    figures = ring.stats()
    assert figures["takes"] == 10
    assert figures["received_bytes"] == 10 * 5 * WIDTH * 2
    assert 0 <= figures["ring_fill"] <= 1 and figures["stall_seconds"] > 0
    (teacher,) = figures["teachers"].values()
    assert (teacher["requests"], teacher["rows"], teacher["linked"]) == (10, 50, True)
    assert 0 <= teacher["idle_share"] <= 1
    assert ring.stats()["takes"] == 0


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
