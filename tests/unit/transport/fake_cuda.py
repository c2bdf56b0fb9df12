"""A CUDA device made of threads, and NCCL over gloo: kernels run late and in stream order, the host never waits.

A stream is the list of kernels that the next one of it waits for. An event is done when the kernels recorded in it are.
"""

import contextlib
import threading
from concurrent.futures import Future
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist

from disaggkd_cli.transport.cuda import Streams

_threads = threading.local()


def in_a_thread(work):
    """Return the future of `work`, done in a thread that does not keep the process from ending."""
    done = Future()

    def run():
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


class FakeStream:
    """`in_step`: the host runs no further than the stream, for test code that computes without kernels."""

    def __init__(self, in_step=False):
        self.tail = []
        self.in_step = in_step

    def wait_event(self, event):
        self.tail = self.tail + event.kernels
        if self.in_step:
            event.synchronize()

    def launch(self, kernel):
        """Run `kernel` in a thread once everything before it on this stream is done."""
        before = list(self.tail)

        def run():
            for earlier in before:
                earlier.result()
            kernel()

        done = in_a_thread(run)
        self.tail = [done]
        return done


class FakeEvent:
    def __init__(self):
        self.kernels = []

    def record(self, stream):
        self.kernels = list(stream.tail)

    def query(self):
        return all(kernel.done() for kernel in self.kernels)

    def synchronize(self):
        for kernel in self.kernels:
            kernel.exception()


def current_device():
    """The calling thread's device: 0 unless it set another one, as in CUDA."""
    return getattr(_threads, "device", 0)


POOL_STREAMS = 32
"""Streams of a device that torch has; the next one that is asked for is the first one again."""


class FakeMachine:
    """Devices with a pool of streams each.

    Attributes:
        contexts: numbers of devices on which any thread has opened a context.
        streams: how many streams of each device were asked for.
    """

    def __init__(self):
        self.contexts = set()
        self.streams = {}
        self._pools = {}
        self._links = {}

    def stream(self, device):
        asked = self.streams[device] = self.streams.get(device, 0) + 1
        pool = self._pools.setdefault(device, [FakeStream() for _ in range(POOL_STREAMS)])
        return pool[(asked - 1) % POOL_STREAMS]

    def streams_of(self, device):
        return self._links.setdefault(device, Streams(lambda: self.stream(device)))


class FakeCuda:
    """Stands in for `disaggkd_cli.transport.cuda.Cuda`, with its memory on the CPU.

    Like CUDA it opens a context on the current device of a thread that allocates page-locked memory, and like torch on
    the device that a thread goes back to when it leaves a stream.
    """

    def __init__(self, number=0, machine=None):
        self.device = torch.device("cpu")
        self.number = number
        self.machine = machine or FakeMachine()
        self.default = FakeStream(in_step=True)

    @property
    def streams(self):
        return self.machine.streams_of(self.number)

    def enter_thread(self):
        _threads.device = self.number

    def event(self):
        return FakeEvent()

    def current_stream(self):
        return getattr(_threads, "stream", None) or self.default

    @contextlib.contextmanager
    def on(self, stream):
        before, device = getattr(_threads, "stream", None), current_device()
        _threads.stream, _threads.device = stream, self.number
        self.machine.contexts.add(self.number)
        try:
            yield
        finally:
            _threads.stream, _threads.device = before, device
            self.machine.contexts.add(device)

    def host_buffer(self, size):
        self.machine.contexts.add(current_device())
        return torch.full((size,), 77, dtype=torch.uint8)

    def device_buffer(self, size):
        return torch.full((size,), 99, dtype=torch.uint8)

    def copy(self, target, source):
        self.current_stream().launch(lambda: target.copy_(source))

    def finish(self):
        event = self.event()
        event.record(self.current_stream())
        event.synchronize()


class FakeNccl:
    """A group of two whose transfers are kernels of the current stream, as NCCL's are."""

    def __init__(self, store, side, device):
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=60)
        self.gloo = dist.ProcessGroupGloo(store, side, 2, options)
        self.aborted = threading.Event()
        self.posted = []
        self.error = "SUCCESS"

    def get_error(self):
        return SimpleNamespace(name=self.error)

    def send(self, tensors, peer, tag):
        return self._start("send", tensors, peer, tag)

    def recv(self, tensors, peer, tag):
        return self._start("recv", tensors, peer, tag)

    def abort(self):
        self.aborted.set()
        self.gloo = None

    def _start(self, call, tensors, peer, tag):
        self.posted.append(call)
        group = self.gloo

        def kernel():
            transfer = in_a_thread(lambda: getattr(group, call)(tensors, peer, tag).wait())
            while not (transfer.done() or self.aborted.wait(0.001)):
                pass
            if transfer.done() and transfer.exception():
                self.error = "REMOTE_ERROR"  # and the kernel ends as if nothing were wrong

        return FakeWork(_threads.stream, kernel)


class FakeWork:
    def __init__(self, stream, kernel):
        self._stream, self._done = stream, stream.launch(kernel)

    def wait(self):
        assert self._done in self._stream.tail
