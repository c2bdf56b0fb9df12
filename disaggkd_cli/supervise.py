"""Start the ranks of a run on this machine and look after them, each role on its own.

A dead teacher is started again, with all ranks of its replica, while the student goes on. A dead student rank takes the
other student ranks with it, and all of them start again from the newest valid checkpoint; teachers stay. The student's
exit code is passed on.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from disaggkd_cli.addresses import listen, loopback_address, split_endpoint
from disaggkd_cli.collective_timeouts import stuck_collective
from disaggkd_cli.config import Config
from disaggkd_cli.errors import RunError, UserError
from disaggkd_cli.launch import STUDENT, TEACHER, Place, child_environment
from disaggkd_cli.terminal import write
from disaggkd_cli.training.run_directory import RunDirectory, read_status

_POLL_SECONDS = 0.1
_STOP_SECONDS = 120.0
"""How long a stopping student may take to save before it is killed."""
_FAREWELL_SECONDS = 15.0
"""How long teachers may take to end once the student has."""
_KILL_SECONDS = 30.0
"""How long a rank may take to die of SIGKILL: one that waits for a disk that hangs does not."""
_REPLICA_SECONDS = 5.0
"""How long the other ranks of a replica may take to end once one has died; they notice by themselves."""
_USER_ERROR, _RESUMABLE = 2, 75


@dataclass
class Child:
    """A running rank."""

    place: Place
    process: subprocess.Popen
    output: Path | None
    restarts: int = 0


def places(config: Config, roles: Sequence[str], endpoint: str, listen_fd: int | None) -> list[Place]:
    """Return every rank that a bare start runs on this machine."""
    if STUDENT not in roles:
        return _one_replica(config, endpoint, listen_fd)
    ranks = config.student.ranks
    teachers = config.teacher_ranks if TEACHER in roles else 0
    local = ranks + teachers
    found = [
        Place(
            STUDENT, rank, ranks, 0, rank, local, endpoint, rank == 0, listen_fd if rank == 0 else None, 0, "disaggkd"
        )
        for rank in range(ranks)
    ]
    per_replica = config.teacher.ranks_per_replica
    for number in range(teachers):
        replica, within = divmod(number, per_replica)
        found.append(Place(TEACHER, within, per_replica, replica, ranks + number, local, endpoint, launcher="disaggkd"))
    return found


def _one_replica(config: Config, world_endpoint: str, listen_fd: int | None) -> list[Place]:
    """Return the ranks of a teacher replica that is a job of its own: they meet each other here, the student there."""
    size = config.teacher.ranks_per_replica
    return [
        Place(
            TEACHER, rank, size, 0, rank, size, config.launch.rendezvous, listen_fd=None if rank else listen_fd,
            launcher="disaggkd", world_endpoint=world_endpoint, hosts_world=rank == 0,
        )
        for rank in range(size)
    ]  # fmt: skip


def supervise(
    config: Config,
    roles: Sequence[str],
    arguments: Sequence[str],
    directory: RunDirectory,
    *,
    resume: str,
    restarts: int,
) -> int:
    """Run the ranks of `roles` to their end and return the exit code of the run.

    Args:
        config: the run, checked; `directory` is prepared.
        roles: `student`, `teacher` or both; `teacher` alone is one replica.
        arguments: the config path and overrides, for the children's command lines.
        resume: what the student's first attempt gets as `--resume`.
        restarts: how often the student, and each teacher, may be started again.

    Raises:
        UserError: the rendezvous port is taken.
        RunError: ranks kept dying.
    """
    listener = _listener(config if STUDENT in roles else None)
    try:
        endpoint = "{}:{}".format(*listener.getsockname()[:2])
        return _Supervisor(config, arguments, directory, resume, restarts).run(
            places(config, roles, endpoint, listener.fileno())
        )
    finally:
        listener.close()


def _listener(config: Config | None) -> socket.socket:
    """Listen where the ranks will meet. The socket outlives a student that dies, so the port stays ours."""
    meeting = None if config is None else config.launch.rendezvous
    return listen(*split_endpoint(meeting or f"{loopback_address()}:0"))


class _Supervisor:
    def __init__(
        self, config: Config, arguments: Sequence[str], directory: RunDirectory, resume: str, restarts: int
    ) -> None:
        self.config = config
        self.arguments = list(arguments)
        self.directory = directory
        self.resume = resume
        self.restarts = restarts
        self.attempt = 0
        self.progress = sorted(path.name for path in directory.checkpoints.glob("step_*"))
        self.signals = 0
        self.children: list[Child] = []
        self.dying: dict[int, float] = {}

    def run(self, every: list[Place]) -> int:
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._on_signal)
        try:
            self.children = [self._start(place) for place in every]
            return self._watch()
        finally:
            self._kill(self.children)
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _start(self, place: Place, restarts: int = 0) -> Child:
        command = [sys.executable, "-m", "disaggkd_cli", place.role, *self.arguments]
        if place.role == STUDENT:
            command += ["--resume", self.resume if place.attempt == 0 else "auto"]
        shown = place.role == STUDENT and place.rank == 0
        output = None if shown else self.directory.logs / f"{place.name.replace(' ', '_')}.out"
        stream = None if output is None else output.open("ab")
        try:
            process = subprocess.Popen(
                command,
                # c10d's C++ side prints stack traces for events that are handled here, such as a peer that went away.
                env=child_environment(place, {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
                pass_fds=() if place.listen_fd is None else (place.listen_fd,),
                preexec_fn=_die_with_parent,
            )
        finally:
            if stream is not None:
                stream.close()
        return Child(place, process, output, restarts)

    def _watch(self) -> int:
        while True:
            students = [child for child in self.children if child.place.role == STUDENT]
            codes = [child.process.poll() for child in students]
            ended = [code for code in codes if code is not None]
            bad = [code for code in ended if code not in (0, _RESUMABLE)]
            if bad:
                code = self._student_died(students)
                if code is not None:
                    return code
            elif students and len(ended) == len(students):
                self._farewell()
                return _RESUMABLE if _RESUMABLE in codes else 0
            self._look_after_teachers(bool(students))
            if not students and all(child.process.poll() is not None for child in self.children):
                codes = [child.process.returncode for child in self.children]
                code = _USER_ERROR if _USER_ERROR in codes else int(any(codes))
                if code and not self.signals:
                    self._show(self.children, code if code in codes else min(codes))
                return code
            time.sleep(_POLL_SECONDS)

    def _student_died(self, students: list[Child]) -> int | None:
        """Start all student ranks again, or return the exit code when that is no use."""
        deadline = time.monotonic() + 3.0
        while time.monotonic() < deadline and any(child.process.poll() is None for child in students):
            time.sleep(_POLL_SECONDS)  # those that know why end by themselves, and say so
        known = [child.process.poll() for child in students]
        died = [child for child in students if child.process.returncode not in (None, 0, _RESUMABLE)]
        # A rank that was killed is the cause; those that then missed it in a collective end with an error of their own.
        first = min(died, key=lambda child: child.process.returncode)
        self._kill(students)
        if _USER_ERROR in known:
            self._show(students, _USER_ERROR)
            return _USER_ERROR
        progress = sorted(path.name for path in self.directory.checkpoints.glob("step_*"))
        # A fault of the program itself comes again when it starts from the same point; being killed need not.
        hopeless = first.process.returncode > 0 and progress == self.progress
        if self.signals or hopeless or self.attempt >= self.restarts:
            self._show(students, 1)
            said = f"{first.place.name} {_ending(first.process.returncode)}{_why(students)}"
            if hopeless:
                said += " before it reached a new checkpoint, so starting it again would end the same way"
            elif self.attempt:
                said += f"; gave up after {self.attempt} restarts (--restarts {self.restarts})"
            raise RunError(f"{said}{self._cause(first)}; logs: {self.directory.logs}")
        self.attempt += 1
        self.progress = progress
        _say(
            f"{first.place.name} {_ending(first.process.returncode)}{_why(students)}; starting the student again from "
            f"its newest valid checkpoint (restart {self.attempt} of {self.restarts})"
        )
        for child in students:
            self.children.remove(child)
            self.children.append(self._start(replace(child.place, attempt=self.attempt)))
        return None

    def _cause(self, first: Child) -> str:
        """Return what student 0 has recorded of its own end, where it is the one that ended."""
        status = read_status(self.directory)
        if first.place.rank or status is None or status.state != "failed" or first.process.returncode < 0:
            return ""
        return f": {status.reason}"

    def _look_after_teachers(self, with_students: bool) -> None:
        replicas: dict[int, list[Child]] = {}
        for child in self.children:
            if child.place.role == TEACHER:
                replicas.setdefault(child.place.replica, []).append(child)
        for ranks in replicas.values():
            codes = [child.process.poll() for child in ranks]
            # A teacher that ended well was told to: by the student, which is about to end, or by a person.
            if not any(codes) or not with_students or self.signals:
                continue
            since = self.dying.setdefault(ranks[0].place.replica, time.monotonic())
            if None in codes and time.monotonic() - since < _REPLICA_SECONDS:
                continue  # those that know why end by themselves, and say so
            del self.dying[ranks[0].place.replica]
            self._replica_died(ranks)

    def _replica_died(self, ranks: list[Child]) -> None:
        """Start a replica again, all its ranks together, unless that is no use."""
        died = [child for child in ranks if child.process.returncode]
        # As with students: the rank that was killed is the cause, the others ended since they missed it.
        first = min(died, key=lambda child: child.process.returncode)
        code, restarts = first.process.returncode, first.restarts
        self._kill(ranks)
        for child in ranks:
            self.children.remove(child)
        refused = [child for child in died if child.process.returncode == _USER_ERROR]
        if refused:
            raise UserError(f"{refused[0].place.name} could not start:\n{_tail(refused[0].output)}")
        if restarts >= self.restarts:
            _say(
                f"{first.place.name} {_ending(code)} and was started {restarts} times already "
                f"(--restarts {self.restarts}); going on without it. {_tail(first.output, 1)}"
            )
            return
        whole = "" if len(ranks) == 1 else f" with all {len(ranks)} ranks of its replica"
        _say(f"{first.place.name} {_ending(code)}{_why(ranks)}; starting it again{whole}")
        for child in ranks:
            self.children.append(self._start(replace(child.place, attempt=restarts + 1), restarts + 1))

    def _farewell(self) -> None:
        """Give teachers, which learn of the student's end from the student, time to go by themselves."""
        deadline = time.monotonic() + _FAREWELL_SECONDS
        while time.monotonic() < deadline and any(child.process.poll() is None for child in self.children):
            time.sleep(_POLL_SECONDS)

    def _on_signal(self, number: int, frame: object) -> None:
        self.signals += 1
        students = [child for child in self.children if child.place.role == STUDENT]
        if self.signals == 1:
            doing = "saving and stopping" if students else "stopping"
            _say(f"{signal.Signals(number).name}: {doing} (once more to quit at once)")
            for child in students or self.children:
                _send(child, signal.SIGTERM)
            self._deadline(time.monotonic() + _STOP_SECONDS)
            return
        self._kill(self.children)
        os._exit(128 + number)

    def _deadline(self, when: float) -> None:
        signal.signal(signal.SIGALRM, lambda *_: self._kill(self.children))
        signal.alarm(max(1, int(when - time.monotonic())))

    def _kill(self, children: Sequence[Child]) -> None:
        for child in children:
            _send(child, signal.SIGKILL)
        for child in children:
            try:
                child.process.wait(_KILL_SECONDS)
            except subprocess.TimeoutExpired:
                _say(f"{child.place.name} (process {child.process.pid}) hangs in the kernel; it is left behind")

    def _show(self, children: Sequence[Child], code: int) -> None:
        """Print the last words of a rank whose output went to a file, unless student 0 spoke on the terminal."""
        if any(child.output is None and child.process.returncode == code for child in children):
            return
        for child in children:
            if child.output is not None and child.process.returncode == code:
                _say(f"{child.place.name}: {_tail(child.output)}")
                return


def _send(child: Child, number: signal.Signals) -> None:
    if child.process.poll() is None:
        try:
            os.killpg(child.process.pid, number)
        except ProcessLookupError:
            child.process.poll()


def _die_with_parent() -> None:
    """Ask Linux to end this child when the supervisor dies, whatever kills it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _ending(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _why(ranks: Sequence[Child]) -> str:
    """Say, where torch aborted ranks over a stuck collective, which one it was."""
    if all(child.process.returncode != -signal.SIGABRT for child in ranks):
        return ""
    told = stuck_collective((child.place.name, child.output) for child in ranks)
    guesses = "a collective waited too long, memory ran out or a peer sent too much; what it says stands above"
    return f" ({told or f'its C++ side does so when {guesses}'})"


def _tail(path: Path | None, lines: int = 12) -> str:
    if path is None or not path.exists():
        return ""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-lines:])


def _say(text: str) -> None:
    write(text, sys.stderr)
