"""Start `python …` by a fork of a process that has everything imported: its imports cost more than most tests.

What is started is a child of the process that starts it, with the standard files, environment, working directory,
session, inherited descriptors, signals and exit code that `subprocess.Popen` would give it. Commands that a fork could
not stand for (another interpreter, variables that an import reads) are started afresh.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import inspect
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from tests.support.warm_server import Request

_REAL_POPEN = subprocess.Popen
_EXECUTE = inspect.signature(_REAL_POPEN._execute_child)
_TESTS = Path(__file__).parents[1]
_READ_AT_IMPORT = (
    "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TORCH", "PYTORCH_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "CUDA_",
    "NCCL_", "LD_", "MALLOC_", "GLIBC_", "HOME", "XDG_", "PATH", "LANG", "LC_",
)  # fmt: skip
"""Variables that a process started afresh may read before its first line; where one differs, none is forked."""
_READ_LATER = {"TORCH_CPP_LOG_LEVEL", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS"}
"""What only CUDA reads when it starts, and what is set before each start anyway."""
_ANSWER_SECONDS = 120.0
_ROOM = 60_000
"""Characters; one argument or variable has at most 128 KiB."""
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


class Server:
    """A forking server of this process: the control socket, and the environment that its imports saw."""

    def __init__(self, control: socket.socket, environment: dict[str, str]):
        self.environment = environment
        self._control = control
        self._lock = threading.Lock()

    def start(self, request: Request, files: list[int]) -> int:
        """Return the process id of a new child of this process."""
        with self._lock, _adopting():
            socket.send_fds(self._control, [json.dumps(asdict(request)).encode()], files)
            return int(self.answer())

    def answer(self) -> bytes:
        """Return the server's next message."""
        readable, _, _ = select.select([self._control], [], [], _ANSWER_SECONDS)
        answer = self._control.recv(4096) if readable else b""
        if not answer:
            raise RuntimeError("the server that forks test processes does not answer")
        return answer


@contextlib.contextmanager
def _adopting():
    """Meanwhile become the parent of what dead descendants leave."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SUBREAPER, 0, 0, 0, 0)


_server: Server | None = None


def _this_server() -> Server:
    """Return the server of this process, started with the first command."""
    global _server
    if _server is None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        # With room for other command lines and variables where /proc reads those of what is forked from it.
        command = [sys.executable, "-m", "tests.support.warm_server", str(theirs.fileno()), " " * _ROOM]
        _REAL_POPEN(
            command, env={**environment, "ROOM": " " * _ROOM}, cwd=_TESTS.parent, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), start_new_session=True,
        )  # fmt: skip
        theirs.close()
        server = Server(ours, environment)
        if (said := server.answer()) != b"ready":
            raise RuntimeError(said.decode())
        atexit.register(ours.close)
        _server = server
    return _server


def use_in_this_process(control: socket.socket) -> None:
    """Let everything that this process starts through `subprocess` come from its own server."""
    global _server
    _server = Server(control, dict(os.environ))
    subprocess.Popen = WarmPopen


class WarmPopen(_REAL_POPEN):
    """`subprocess.Popen` that forks what runs a module or a script of this project, where a fork can stand for it."""

    def _execute_child(self, *given) -> None:
        call = _EXECUTE.bind(self, *given).arguments
        environment = dict(os.environ) if call["env"] is None else dict(call["env"])
        command, preexec = _program(call), _named(call["preexec_fn"])
        if preexec is None or command is None or not _same_imports(environment, _this_server()):
            return super()._execute_child(*given)
        passed = [number for number in call["pass_fds"] if number > 2]
        cwd = os.path.abspath(call["cwd"] or os.getcwd())
        session = bool(call["start_new_session"])
        request = Request(command, environment, cwd, passed, session, preexec, os.getpid())
        standard = [call["p2cread"], call["c2pwrite"], call["errwrite"]]
        standard = [own if given == -1 else given for own, given in enumerate(standard)]
        self.pid = _this_server().start(request, [*standard, *passed])
        self._child_created = True
        self._close_what_the_child_has(call)

    def _close_what_the_child_has(self, call: dict) -> None:
        nothing = getattr(self, "_devnull", None)
        for child, parent in (("p2cread", "p2cwrite"), ("c2pwrite", "c2pread"), ("errwrite", "errread")):
            if -1 not in (call[child], call[parent]) and call[child] != nothing:
                os.close(call[child])
        if nothing is not None:
            os.close(nothing)
        self._closed_child_pipe_fds = True


def _program(call: dict) -> list[str] | None:
    """Return a command that runs a module or a script of this project; None for other commands."""
    given = call["args"]
    if isinstance(given, (str, bytes)) or call["shell"] or call["executable"] not in (None, sys.executable):
        return None
    command = [os.fspath(part) for part in given]
    if command[0] != sys.executable or len(command) < 2:
        return None
    if command[1] == "-m":
        return command if command[2].split(".")[0] in ("disaggkd_cli", "tests") else None
    return command if command[1].endswith(".py") and Path(command[1]).is_relative_to(_TESTS) else None


def _same_imports(environment: dict[str, str], server: Server) -> bool:
    names = {name for name in {*environment, *server.environment} if name.startswith(_READ_AT_IMPORT)} - _READ_LATER
    return all(environment.get(name) == server.environment.get(name) for name in names)


def _named(function: Callable[[], None] | None) -> list | None:
    """Return `[MODULE, FUNCTION, ARGUMENT ...]` of a module's function, an empty list for none, None for a nameless
    one."""
    if function is None:
        return []
    arguments = []
    if isinstance(function, functools.partial):
        function, arguments = function.func, list(function.args)
    same = getattr(sys.modules.get(function.__module__), function.__qualname__, None) is function
    return [function.__module__, function.__qualname__, *arguments] if same else None
