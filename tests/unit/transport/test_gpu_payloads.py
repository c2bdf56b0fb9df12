"""Payloads between two GPUs, staged through the host or over NCCL, on stand-ins whose kernels run late."""

import os
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from disaggkd_cli.errors import SavedAndResumable
from disaggkd_cli.transport import LinkLost, cuda, nccl_payloads
from disaggkd_cli.transport.nccl_environment import DEFAULTS, REQUIRED, prepare_nccl_environment
from disaggkd_cli.transport.nccl_payloads import form_nccl_payloads, make_nccl_group
from disaggkd_cli.transport.pair import STUDENT, TEACHER
from disaggkd_cli.transport.payloads import StagedPayloads
from disaggkd_cli.transport.slots import make_slots
from tests.unit.transport.fake_cuda import FakeCuda, FakeEvent, FakeMachine, FakeNccl, FakeStream
from tests.unit.transport.test_exchange import WIDTH, Exchange, hidden_of, ids_of, make_request, ring_over, wait_until

pytestmark = pytest.mark.timeout(60)


class Machine:
    """GPUs for every teacher and student of a test, and the NCCL groups between them."""

    def __init__(self, monkeypatch, backend):
        self.groups = []
        self.make_group = FakeNccl
        self.machine = FakeMachine()
        devices = iter(range(1000))
        for number, module in ((1, "pool"), (2, "server"), (2, "answers")):
            monkeypatch.setattr(
                f"disaggkd_cli.transport.{module}.cuda_of", lambda device, number=number: FakeCuda(number, self.machine)
            )
        for module in ("pool", "server"):
            monkeypatch.setattr(
                f"disaggkd_cli.transport.{module}.describe_device",
                lambda device, wanted: {"device": f"cuda {next(devices)}", "backend": backend},
            )
        monkeypatch.setattr(nccl_payloads, "make_nccl_group", self._make)

    def _make(self, store, side, device):
        group = self.make_group(store, side, device)
        self.groups.append(group)
        return group


@pytest.fixture
def machine(monkeypatch):
    return lambda backend: Machine(monkeypatch, backend)


@pytest.fixture
def exchange():
    made = Exchange()
    yield made
    made.close()


@pytest.mark.parametrize("backend", ["gloo", "auto"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
def test_hidden_states_arrive_whole_and_in_order(exchange, machine, backend, dtype):
    gpus = machine(backend)
    exchange.teacher(dtype=dtype)
    pool = exchange.pool(dtype=dtype)
    ring = ring_over(pool, [make_request(n, rows=n % 6) for n in range(30)], 3, dtype)
    taken = []
    for lease in ring:
        assert torch.allclose(lease.hidden.float(), hidden_of(lease.request), rtol=0.07)
        taken.append(lease.request_id)
        lease.release()
    assert taken == list(range(30))
    assert len(gpus.groups) == (2 if backend == "auto" else 0)
    assert gpus.machine.contexts == {1, 2}, "a thread opened a context on a device that is not its own"
    assert [teacher["backend"] for teacher in pool.stats().values()] == ["nccl" if backend == "auto" else "gloo"]
    if backend == "auto":
        assert sorted({call for group in gpus.groups for call in group.posted}) == ["recv", "send"]
        assert {len(group.posted) for group in gpus.groups} == {26}  # 25 requests with rows, and the probe


@pytest.mark.parametrize("backend", ["gloo", "auto"])
def test_a_slot_is_asked_for_only_when_its_readers_are_done(exchange, machine, backend):
    machine(backend)
    seen = []
    exchange.teacher(forward=lambda request: (seen.append(request.request_id), hidden_of(request))[1])
    pool = exchange.pool()
    ring = ring_over(pool, [make_request(n) for n in range(3)], depth=1)
    lease = ring.take()
    reading = Future()
    pool.cuda.default.tail.append(reading)  # the trainer's kernels still run when it lets go of the lease
    lease.release()
    time.sleep(0.3)
    assert seen == [0]
    reading.set_result(None)
    assert ids_of(ring) == [1, 2] and seen == [0, 1, 2]


def test_a_new_ring_asks_for_nothing_while_its_memory_may_still_be_in_use(exchange, machine):
    machine("auto")
    seen = []
    exchange.teacher(forward=lambda request: (seen.append(request.request_id), hidden_of(request))[1])
    pool = exchange.pool()
    earlier = Future()
    pool.cuda.default.tail.append(earlier)
    ring = ring_over(pool, [make_request(n) for n in range(2)], depth=1)
    pool.wait_for_teacher()
    time.sleep(0.3)
    assert seen == []
    earlier.set_result(None)
    assert ids_of(ring) == [0, 1]


def test_the_trainer_takes_a_staged_lease_before_its_copy_has_run(exchange, machine):
    """The host does not wait: the trainer's stream does."""
    machine("gloo")
    pool = exchange.pool()
    pool.cuda.default.in_step = False
    holding = Future()
    original = FakeCuda.copy

    def late_copy(self, target, source):
        if self is pool.cuda:
            self.current_stream().tail.append(holding)
        original(self, target, source)

    pool.cuda.copy = late_copy.__get__(pool.cuda)
    exchange.teacher()
    ring = ring_over(pool, [make_request(1)])
    lease = ring.take()
    assert not torch.equal(lease.hidden, hidden_of(lease.request).bfloat16())
    holding.set_result(None)
    pool.cuda.finish()
    assert torch.equal(lease.hidden, hidden_of(lease.request).bfloat16())


def test_states_that_are_not_finite_are_found_on_the_gpu(exchange, machine):
    machine("auto")
    bad = []

    def forward(request):
        if request.request_id == 3 and not bad:
            bad.append(1)
            return hidden_of(request) * float("nan")
        return hidden_of(request)

    exchange.teacher(forward=forward)
    pool = exchange.pool()
    assert ids_of(ring_over(pool, [make_request(n) for n in range(6)])) == list(range(6))
    assert any("not finite" in line for line in pool.events)


class Stalling(FakeNccl):
    """Its third send never starts; `hangs`: nor does an abort return."""

    hangs = False

    def send(self, tensors, peer, tag):
        if len(self.posted) == 3:
            self.posted.append("stalled")
            return super()._start("recv", [torch.empty(1, dtype=torch.uint8)], peer, 9)
        return super().send(tensors, peer, tag)

    def abort(self):
        if self.hangs:
            time.sleep(3600)
        super().abort()


def test_a_stalled_transfer_is_aborted_and_its_request_goes_to_the_next_link(exchange, machine):
    gpus = machine("auto")
    gpus.make_group = Stalling
    exchange.teacher(timeout=1)
    pool = exchange.pool(timeout=1)
    taking = ring_over(pool, [make_request(n) for n in range(4)])
    assert [taking.take().request_id for _ in range(2)] == [0, 1]
    wait_until(lambda: any("could not receive a payload over NCCL" in line for line in pool.events))
    gpus.make_group = FakeNccl
    assert ids_of(taking) == [2, 3]
    assert all(group.aborted.is_set() for group in gpus.groups[:2])
    assert pool.teachers == 1


def test_a_transfer_that_cannot_be_aborted_ends_the_process_resumable(exchange, machine, monkeypatch):
    monkeypatch.setattr(nccl_payloads, "ABORT_SECONDS", 0.3)
    monkeypatch.setattr(Stalling, "hangs", True)
    machine("auto").make_group = Stalling
    exchange.teacher(timeout=1)
    pool = exchange.pool(timeout=1)
    ring = ring_over(pool, [make_request(n) for n in range(4)])
    with pytest.raises(SavedAndResumable, match="nor end the transfer by an abort.*--resume auto"):
        for _ in range(4):
            ring.take()
    wait_until(lambda: exchange.served)
    assert isinstance(exchange.served["teacher 0"], SavedAndResumable)


def test_where_nccl_does_not_come_about_auto_goes_on_over_gloo(exchange, machine):
    class Deaf(FakeNccl):
        def __init__(self, *arguments):
            raise RuntimeError("no route to the peer's network")

    machine("auto").make_group = Deaf
    exchange.teacher()
    pool = exchange.pool()
    assert ids_of(ring_over(pool, [make_request(n) for n in range(5)])) == list(range(5))
    assert any("no payloads over NCCL: no route" in line for line in pool.events), pool.events


@pytest.fixture
def pair_of_channels(monkeypatch):
    def form(make_group=FakeNccl, **options):
        monkeypatch.setattr(nccl_payloads, "make_nccl_group", make_group)
        return form_channels(**options)

    return form


def form_channels(cuda=None, **options):
    store = dist.HashStore()
    made = {}

    def form(side):
        try:
            made[side] = form_nccl_payloads(store, side, cuda or FakeCuda(), name=f"link {side}", timeout=5, **options)
        except LinkLost as error:
            made[side] = error

    threads = [threading.Thread(target=form, args=(side,)) for side in (STUDENT, TEACHER)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return made[STUDENT], made[TEACHER]


def test_a_damaged_probe_refuses_the_channel(pair_of_channels):
    class Flipping(FakeNccl):
        def send(self, tensors, peer, tag):
            return super().send([tensor ^ 4 for tensor in tensors], peer, tag)

    groups = []
    student, _ = pair_of_channels(lambda *arguments: (groups.append(Flipping(*arguments)), groups[-1])[1])
    assert "the probe arrived damaged" in str(student)
    assert any(group.aborted.wait(5) for group in groups)


def test_a_channel_that_does_not_form_in_time_says_so(pair_of_channels):
    class Slow(FakeNccl):
        def __init__(self, *arguments):
            time.sleep(3600)

    student, _ = pair_of_channels(Slow, forming_timeout=0.2)
    assert "no payloads over NCCL: nothing within 0.2 s" in str(student)


def test_a_channel_that_forms_too_late_is_given_up_again(pair_of_channels):
    groups = []

    class Late(FakeNccl):
        def __init__(self, *arguments):
            time.sleep(0.5)
            super().__init__(*arguments)
            groups.append(self)

    pair_of_channels(Late, forming_timeout=0.2)
    wait_until(lambda: len(groups) == 2)
    assert all(group.aborted.wait(10) for group in groups)


def test_a_closed_channel_gives_its_communicator_up_and_refuses_further_payloads(pair_of_channels):
    student, teacher = pair_of_channels()
    groups = student._group, teacher._group
    threading.Timer(0.2, student.close).start()
    with pytest.raises(LinkLost, match="could not receive a payload over NCCL: the link is closed"):
        student.start_receive(*make_slots(1, 8, FakeCuda()), 8).wait()
    teacher.close()
    assert all(group.aborted.wait(5) for group in groups)
    with pytest.raises(LinkLost, match="closed"):
        teacher.start(torch.zeros(8, dtype=torch.uint8))


def test_what_a_failing_communicator_lets_go_is_not_believed(pair_of_channels):
    """The receive's event is done, for the kernel ended; the bytes never came."""
    student, teacher = pair_of_channels()
    teacher.close()
    teacher = None
    with pytest.raises(LinkLost, match="NCCL reports REMOTE_ERROR"):
        student.start_receive(*make_slots(1, 8, FakeCuda()), 8).wait()


def test_an_operation_that_nccl_refuses_loses_the_link(pair_of_channels):
    class Refusing(FakeNccl):
        def send(self, tensors, peer, tag):
            if self.posted:
                raise RuntimeError("remote process exited\nmore")
            return super().send(tensors, peer, tag)

    _, teacher = pair_of_channels(Refusing)
    group = teacher._group
    with pytest.raises(LinkLost, match="NCCL refused to send a payload: remote process exited$"):
        teacher.start(torch.zeros(8, dtype=torch.uint8))
    assert group.aborted.is_set()


@pytest.mark.parametrize("before", [None, "1"])
def test_a_group_is_capped_and_blocking_and_without_the_handler_that_ends_processes(monkeypatch, before):
    variable = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.delenv(variable, raising=False)
    if before:
        monkeypatch.setenv(variable, before)
    seen = {}

    class Group:
        class Options:
            def __init__(self):
                self.config = SimpleNamespace()

        def __init__(self, store, rank, size, options):
            seen.update(handling=os.environ[variable], rank=rank, size=size, options=options)

        def eager_connect_single_device(self, device):
            seen["device"] = device

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    make_nccl_group(None, TEACHER, torch.device("cuda", 1))
    assert (seen["handling"], seen["rank"], seen["size"], seen["device"].index) == ("0", TEACHER, 2, 1)
    assert os.environ.get(variable) == (before or "3")
    assert (seen["options"].config.max_ctas, seen["options"].config.blocking) == (nccl_payloads.MAX_CTAS, 1)
    assert seen["options"]._timeout.total_seconds() > 3600


def test_the_environment_keeps_a_failed_link_from_ending_the_run(monkeypatch):
    for name in (*REQUIRED, *DEFAULTS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    prepare_nccl_environment()
    found = {name: os.environ[name] for name in (*REQUIRED, *DEFAULTS)}
    assert found == {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_BLOCKING_WAIT": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "CUDA_DEVICE_MAX_CONNECTIONS": "8",
    }  # fmt: skip


def test_nine_links_have_streams_of_their_own_and_later_ones_use_theirs_again(pair_of_channels):
    """torch has 32 streams a device; with more asked for, links would wait for each other and for reductions."""
    machine = FakeMachine()
    for _ in range(4):
        channels = [pair_of_channels(cuda=FakeCuda(1, machine)) for _ in range(9)]
        for student, teacher in channels:
            with student.inspecting(), teacher.inspecting():
                pass
        streams = [channel._stream for both in channels for channel in both]
        assert len({id(stream) for stream in streams}) == 18
        idle = [channel for both in channels for channel in both]
        for channel in idle:
            channel.close()
        wait_until(lambda: len(machine.streams_of(1)._idle) == 18)
    assert machine.streams[1] == 19


def test_staging_streams_are_used_again():
    machine = FakeMachine()
    for _ in range(40):
        channel = StagedPayloads(SimpleNamespace(close=lambda: None), FakeCuda(1, machine))
        channel.close()
        channel.close()
    assert machine.streams[1] == 1


def test_the_real_device_asks_torch_for_what_the_stand_in_makes(monkeypatch):
    """Every call of `Cuda` goes to torch with the device; what is missing in the stand-in would show here."""
    asked = []

    def note(name, result):
        return lambda *arguments, **options: (asked.append((name, arguments, options)), result)[1]

    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "Stream", note("Stream", "stream"))
    monkeypatch.setattr(torch.cuda, "Event", note("Event", FakeEvent()))
    monkeypatch.setattr(torch.cuda, "current_stream", note("current_stream", FakeStream()))
    monkeypatch.setattr(torch.cuda, "stream", note("stream", "context"))
    real = cuda.Cuda(gpu)
    monkeypatch.setattr(torch.cuda, "set_device", note("set_device", None))
    monkeypatch.setattr(cuda, "_streams", {})
    assert (real.streams.borrow(), real.on("stream")) == ("stream", "context")
    assert cuda.Cuda(gpu).streams is real.streams
    real.enter_thread()
    real.finish()
    target = torch.zeros(3)
    real.copy(target, torch.ones(3))
    assert target.sum() == 3
    monkeypatch.setattr(torch, "empty", note("empty", "host"))
    monkeypatch.setattr(torch, "zeros", note("zeros", "device"))
    assert (real.host_buffer(4), real.device_buffer(4)) == ("host", "device")
    assert [name for name, *_ in asked] == [
        "Stream", "stream", "set_device", "Event", "current_stream", "empty", "zeros",
    ]  # fmt: skip
    assert asked[0][1] == asked[2][1] == asked[4][1] == (gpu,)
    assert asked[5][2]["pin_memory"] and asked[6][2]["device"] == gpu
    public = {name for name in vars(cuda.Cuda) if not name.startswith("_")}
    assert public <= set(dir(FakeCuda))


def test_a_wait_for_an_event_is_bounded_and_ends_early_when_the_peer_is_gone():
    event = FakeEvent()
    assert cuda.wait_for_event(event, 0)
    event.kernels.append(Future())
    assert not cuda.wait_for_event(event, 0.01)
    began = time.monotonic()
    assert not cuda.wait_for_event(event, 30, gone=lambda: True)
    assert time.monotonic() - began < 10
    event.kernels[0].set_result(None)
    assert cuda.wait_for_event(event, 30)


def test_slots_are_one_piece_aligned_and_not_shared():
    slots = make_slots(3, 100)
    assert [slot.buffer.numel() for slot in slots] == [128] * 3
    assert all(slot.buffer.data_ptr() % 64 == 0 and slot.host_buffer is slot.buffer for slot in slots)
    (on_gpu,) = make_slots(1, WIDTH, FakeCuda())
    assert on_gpu.host_buffer is on_gpu.host_buffer is not on_gpu.buffer
