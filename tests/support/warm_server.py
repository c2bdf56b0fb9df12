"""A process that has everything imported and forks a process for each command that it is asked to run.

It starts no threads and keeps nothing but modules, so that what it forks begins as a fresh interpreter would after its
imports. Each such process asks a server of its own (a fork of this one) for the ranks that it starts.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = (
    "disaggkd_cli.cli", "disaggkd_cli.jobs", "disaggkd_cli.student", "disaggkd_cli.teacher", "disaggkd_cli.transport",
    "disaggkd_cli.losses", "disaggkd_cli.planner", "disaggkd_cli.report", "transformers.models.llama.modeling_llama",
    "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
    "torch.utils.tensorboard", "torch.profiler", "pydantic", "pydantic.type_adapter", "numpy.ctypeslib",
    "omegaconf._impl", "encodings.idna", "pytest", "hypothesis",
)  # fmt: skip
_SUPERVISING = {"run", "student", "teacher", "generator", "bench"}
_FIRST_FREE = 400
"""Descriptors above it are nobody's."""
_ADOPTED_SECONDS = 30.0


@dataclass(frozen=True)
class Request:
    """What to become.

    Attributes:
        command: as on a command line: `[PYTHON, "-m", MODULE, ...]` or `[PYTHON, SCRIPT, ...]`.
        environment, cwd: of the process.
        descriptors: the numbers that the passed files get, after standard input, output and error.
        new_session: whether the process leads a session of its own.
        preexec: `[MODULE, FUNCTION, ARGUMENT ...]` that is called before the program runs, or nothing.
        owner: process id of the parent.
    """

    command: list[str]
    environment: dict[str, str]
    cwd: str
    descriptors: list[int]
    new_session: bool
    preexec: list[Any]
    owner: int

    @property
    def arguments(self) -> list[str]:
        """What follows the module or the script."""
        return self.command[3:] if self.command[1] == "-m" else self.command[2:]


def serve(control: socket.socket) -> tuple[Request, list[int]]:
    """Fork a process for each request on `control`; return in those processes only. Ends with the other side."""
    while True:
        message, files, _, _ = socket.recv_fds(control, 1 << 20, 64)
        if not message:
            os._exit(0)
        between = os.fork()
        if between == 0:
            # The process that asked adopts what its dead descendant leaves, and so becomes the parent.
            if os.fork():
                os._exit(0)
            return Request(**json.loads(message)), files
        os.waitpid(between, 0)
        for number in files:
            os.close(number)


def become(request: Request, files: list[int], control: socket.socket) -> socket.socket:
    """Make this fork of the server the process that was asked for. Its parent waits for a word on what this returns."""
    inherited = control.detach()
    reply = socket.socket(fileno=fcntl.fcntl(inherited, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE))
    os.close(inherited)
    high = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE) for number in files]
    os.closerange(3, _FIRST_FREE)
    for number, target in zip(high, [0, 1, 2, *request.descriptors], strict=True):
        os.dup2(number, target)
        os.close(number)
    if request.new_session:
        os.setsid()
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.environment)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    deadline = time.monotonic() + _ADOPTED_SECONDS
    while os.getppid() != request.owner:
        if time.monotonic() > deadline:
            os._exit(70)
        time.sleep(0.0005)
    if request.preexec:
        module, name, *arguments = request.preexec
        getattr(importlib.import_module(module), name)(*arguments)
    return reply


def show(request: Request) -> None:
    """Write the request's command line and variables where /proc reads those of this process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, stop, variables, end = map(int, fields[45:49])
    for first, after, texts in (
        (start, stop, request.command),
        (variables, end, [f"{name}={value}" for name, value in request.environment.items()]),
    ):
        block = b"".join(os.fsencode(text) + b"\0" for text in texts)[: after - first - 1]
        ctypes.memset(first, 0, after - first)
        ctypes.memmove(first, block, len(block))


def offspring_server() -> tuple[socket.socket, tuple[Request, list[int], socket.socket] | None]:
    """Fork a server for what this process starts. Returns its control socket, and in what it forks their request."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        return ours, None
    os.setsid()
    theirs = socket.socket(fileno=fcntl.fcntl(theirs.detach(), fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE))
    ours.detach()
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    os.closerange(3, _FIRST_FREE)
    request, files = serve(theirs)
    return ours, (request, files, theirs)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOADED:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    if len(threads) != 1:
        control.send(f"the imports started {len(threads) - 1} threads, and a fork would lose them".encode())
        return
    gc.collect()
    gc.freeze()
    control.send(b"ready")
    request, files = serve(control)
    reply = become(request, files, control)
    while request.arguments and request.arguments[0] in _SUPERVISING and "DISAGGKD_ROLE" not in os.environ:
        ours, theirs = offspring_server()
        if theirs is None:
            from tests.support import warm

            warm.use_in_this_process(ours)
            break
        reply.close()
        request, files, control = theirs
        reply = become(request, files, control)
    show(request)
    reply.send(str(os.getpid()).encode())
    reply.close()
    run(request)


def run(request: Request) -> NoReturn:
    """Run the module or the script and end as the interpreter would, but for the taking apart of all modules, which
    costs more than most of what is started here."""
    code: object = 0
    try:
        if request.command[1] == "-m":
            sys.argv = ["-m", *request.arguments]
            runpy.run_module(request.command[2], run_name="__main__", alter_sys=True)
        else:
            script = request.command[1]
            sys.argv = [script, *request.arguments]
            sys.path.insert(0, str(Path(script).parent))
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    main()
