"""What `run`, `student` and `teacher` do once their command line is parsed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path

from disaggkd_cli.addresses import loopback_address
from disaggkd_cli.config import Config, load, to_yaml
from disaggkd_cli.config.by_device import student_dtype
from disaggkd_cli.config.linear_attention import missing_kernels
from disaggkd_cli.config.on_policy import student_writes_all
from disaggkd_cli.errors import DisaggkdError, RunError, UserError
from disaggkd_cli.exits import bound_end
from disaggkd_cli.gpus import HeldGpus, gpus_here, hold_gpus
from disaggkd_cli.launch import STUDENT, TEACHER, Place, discover_rendezvous, find_place, threads_for, under_launcher
from disaggkd_cli.layouts import AUTO, asked_layout, facts_of, require
from disaggkd_cli.planner.models import local_fields
from disaggkd_cli.secret import make_secret, read_secret
from disaggkd_cli.supervise import places, supervise
from disaggkd_cli.terminal import write
from disaggkd_cli.training.run_directory import (
    RunDirectory,
    Status,
    clear,
    describe,
    hold,
    log_path,
    prepare,
    read_status,
)

_log = logging.getLogger("disaggkd")


def run_job(
    command: str,
    path: str,
    overrides: Sequence[str],
    resume: str,
    restarts: int,
    print_config: bool,
    dry_run: bool,
    overwrite: bool = False,
) -> int:
    """Run one command to its end and return its exit code.

    Args:
        overwrite: whether to delete a run that lies in `run_dir`; a person on a terminal is asked first.

    Raises:
        DisaggkdError: with the exit code and the message for a person.
    """
    config = load(path, overrides, running=not print_config)
    if print_config:
        write(to_yaml(config), end="")
        return 0
    config.launch.rendezvous = discover_rendezvous(config, command)
    _check_command(command, config, resume)
    if overwrite and resume != "never":
        raise UserError(f"--overwrite and --resume {resume}: the one deletes what the other goes on with; give one")
    _check_layout(config)
    if config.launch.secret_file:
        read_secret(Path(config.launch.secret_file).expanduser())
    if dry_run:
        if command != TEACHER:
            from disaggkd_cli.data import look_at_texts

            write("\n".join(look_at_texts(config.data, student_writes_all(config))))
        _print_places(config, command)
        on_gpu = config.launch.device == "cuda" or (config.launch.device == "auto" and bool(gpus_here()))
        if config.student.dtype == AUTO and command != TEACHER:
            write(f"student.dtype: auto is {student_dtype(config, 'cuda' if on_gpu else 'cpu')}")
        if on_gpu:
            for line in missing_kernels(config, local_fields):
                write(f"warning: {line}")
        return 0
    if under_launcher() is None and command != TEACHER:
        return _supervised(command, config, [path, *overrides], resume, restarts, overwrite)
    if under_launcher() is None and config.teacher.ranks_per_replica > 1:
        return _supervised_replica(config, [path, *overrides])
    return _one_rank(command, config, resume, overwrite)


def record_job(path: str, overrides: Sequence[str], directory: str) -> int:
    """Record the hidden states that a run of this config would ask its teachers for, and return the exit code.

    Raises:
        UserError: what cannot be read, or a directory that holds something else.
    """
    config = load(path, [*overrides, "teacher.cache=null"], running=True)
    from disaggkd_cli.runtime import set_up
    from disaggkd_cli.training.recorded import record_run

    device = set_up(config, Place(TEACHER), None)
    count = record_run(config, Path(directory).expanduser(), device, _log.info)
    _log.info("recorded %d requests; set teacher.cache=%s", count, directory)
    return 0


def _check_command(command: str, config: Config, resume: str) -> None:
    launcher = under_launcher()
    if command in (STUDENT, TEACHER) and config.mode == "colocated" and launcher != "disaggkd":
        raise UserError(f"mode: colocated runs have no separate {command}; use `disaggkd run`, or mode=disaggregated")
    if launcher is None and command in (STUDENT, TEACHER) and not config.launch.rendezvous:
        raise UserError(
            f"launch.rendezvous: `disaggkd {command}` meets the other side there; add launch.rendezvous=HOST:PORT"
        )
    if resume not in ("auto", "never") and not Path(resume).expanduser().is_dir():
        raise UserError(f"--resume {resume}: is no checkpoint directory; give auto, never, or a directory step_…")


def _check_layout(config: Config) -> None:
    """Refuse a teacher that cannot be laid out so, as far as its config.json is here; its ranks look again."""
    teacher = config.teacher
    fields = local_fields(teacher.model)
    if config.mode == "colocated" or teacher.cache:
        return
    gguf = teacher.model.endswith(".gguf")
    if fields is not None or gguf:
        facts = facts_of(fields or {}, teacher.model, gguf=gguf)
        layout, reason = asked_layout(teacher.parallelism, teacher.ranks_per_replica, facts)
        require(layout, facts)
        if layout.ranks > 1 and teacher.parallelism == AUTO and under_launcher() is None:
            write(f"teacher.parallelism=auto: {layout.parallelism}, since {reason}", sys.stderr)


def _roles(command: str) -> tuple[str, ...]:
    return {"run": (STUDENT, TEACHER), STUDENT: (STUDENT,), TEACHER: (TEACHER,)}[command]


def _supervised(command: str, config: Config, arguments: list[str], resume: str, restarts: int, overwrite: bool) -> int:
    roles = _roles(command)
    with _hold_gpus(config, command, len(places(config, roles, "", None))), _holding(config, command):
        if overwrite:
            _delete_earlier(config)
        directory = _prepare(config, resume=resume != "never")
        try:
            code = supervise(config, roles, arguments, directory, resume=resume, restarts=restarts)
        except DisaggkdError as error:
            _record_failure(directory, error)
            raise
    if code == 75:
        status = read_status(directory)
        write(f"disaggkd: {status.reason if status else 'stopped and saved'}", sys.stderr)
    return code


def _prepare(config: Config, *, resume: bool) -> RunDirectory:
    """Make the run directory ready, with the secret by which this run's teachers know it."""
    directory = prepare(config.run_dir, to_yaml(config), resume=resume)
    if config.teacher_ranks and config.launch.secret == "auto" and not config.launch.secret_file:
        make_secret(directory.secret)
    return directory


def _supervised_replica(config: Config, arguments: list[str]) -> int:
    """Run one teacher replica of several ranks here, with logs beside the student's where that runs here too."""
    directory = RunDirectory(Path(config.run_dir).expanduser())
    directory.logs.mkdir(parents=True, exist_ok=True)
    with _hold_gpus(config, TEACHER, config.teacher.ranks_per_replica):
        return supervise(config, (TEACHER,), arguments, directory, resume="never", restarts=0)


def _hold_gpus(config: Config, command: str, ranks: int) -> HeldGpus:
    """Keep other bare jobs of this machine off the GPUs of this one's ranks; schedulers share out their own."""
    return hold_gpus(0 if config.launch.device == "cpu" else ranks, f"`disaggkd {command}` of {config.run_dir}")


def _holding(config: Config, command: str) -> AbstractContextManager:
    """Hold the run directory against another start while the context lasts."""
    lock = hold(config.run_dir, f"`disaggkd {command}`")
    return nullcontext() if lock is None else closing(lock)


def _record_failure(directory: RunDirectory, error: DisaggkdError) -> None:
    """A rank that was killed could not say how it ended; its supervisor says it."""
    status = read_status(directory) or Status("failed")
    if status.state in ("running", "failed"):
        status.state, status.exit_code, status.reason = "failed", error.exit_code, str(error)
        status.resumable = status.resumable or any(directory.checkpoints.glob("step_*"))
        status.write(directory)


def _delete_earlier(config: Config, *, logs: bool = True) -> None:
    """Delete the run that lies in `run_dir`, if any, once a person at a terminal has said yes.

    Raises:
        UserError: the answer was no, or the run there still goes.
    """
    directory = RunDirectory(Path(config.run_dir).expanduser())
    if not directory.status.exists():
        return
    if sys.stdin.isatty() and sys.stderr.isatty():
        write(f"{config.run_dir} holds a run ({describe(directory)}). Delete it? [y/N] ", sys.stderr, end="")
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise UserError("--overwrite: nothing was deleted")
    clear(directory, logs=logs)


def _one_rank(command: str, config: Config, resume: str, overwrite: bool) -> int:
    place = find_place(config, command)
    bound_end()
    try:
        if place.role == TEACHER:
            with _hold_gpus(config, TEACHER, int(place.launcher == "single")):
                return _teach(config, place)
        directory = RunDirectory(Path(config.run_dir).expanduser())
        first = place.rank == 0 and place.launcher != "disaggkd"
        with _holding(config, command) if first else nullcontext():
            if first:
                if overwrite and place.attempt == 0:
                    _delete_earlier(config, logs=False)  # other ranks may have opened theirs
                directory = _prepare(config, resume=resume != "never" or place.attempt > 0)
            from disaggkd_cli.student import run_student

            run_student(config, place, directory, "auto" if place.attempt > 0 else resume)
    except DisaggkdError as error:
        _log.error("%s ends: %s", place.name, error)
        if place.launcher == "disaggkd" and error.exit_code == 75:
            return 75  # the supervisor says it, once
        raise
    except Exception as error:
        _log.exception("%s ends", place.name)
        where = log_path(RunDirectory(Path(config.run_dir)), place.name) if place.launcher != "single" else "above"
        raise RunError(f"{place.name}: {type(error).__name__}: {error} (traceback: {where})") from error
    return 0


def _teach(config: Config, place: Place) -> int:
    directory = None
    if place.launcher != "single":
        directory = RunDirectory(Path(config.run_dir).expanduser())
    from disaggkd_cli.teacher import run_teacher

    run_teacher(config, place, directory)
    return 0


def _print_places(config: Config, command: str) -> None:
    """Print what would be started, rank by rank."""
    endpoint = config.launch.rendezvous or f"{loopback_address()} (a free port)"
    found = places(config, _roles(command), endpoint, None)
    write(f"config is sound; mode {config.mode}, run_dir {config.run_dir}, meeting at {endpoint}")
    write(
        f"global batch {config.global_batch_sequences} sequences = {config.student.ranks} student ranks x "
        f"{config.train.micro_batch_sequences} sequences x {config.train.accumulation} micro-batches; "
        f"{config.train.steps} steps"
    )
    for place in found:
        model = config.teacher.model if place.role == TEACHER else config.student.model or "see student section"
        write(f"  {place.name:12} threads {threads_for(config, place)}  model {model}")
