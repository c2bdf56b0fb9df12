"""Who this process is: its role, its rank, and where the others are. The only reader of the launcher's variables.

Three launchers are understood. `torchrun` and SLURM start one world of ranks: the first `student.ranks` of it are the
student, the rest teachers. Bare `disaggkd run` starts the ranks itself (see `supervise`) and tells each who it is.
`disaggkd teacher` and `disaggkd student` started apart meet at `launch.rendezvous`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from disaggkd_cli.config import Config
from disaggkd_cli.errors import UserError

STUDENT, TEACHER = "student", "teacher"


@dataclass(frozen=True)
class Place:
    """One process's place in a run.

    Attributes:
        role: `student` or `teacher`.
        rank, size: among the ranks of its role (of its replica, for a teacher).
        replica: which teacher replica it belongs to.
        local_rank, local_size: among all ranks on this machine.
        endpoint: `host:port` of the store where everybody meets; None when nobody needs to meet.
        hosts_store: whether this process serves that store.
        listen_fd: an already listening socket to serve it on.
        attempt: how often the ranks were restarted as a whole.
        launcher: `torchrun`, `slurm`, `disaggkd` or `single`, for the record.
    """

    role: str
    rank: int = 0
    size: int = 1
    replica: int = 0
    local_rank: int = 0
    local_size: int = 1
    endpoint: str | None = None
    hosts_store: bool = False
    listen_fd: int | None = None
    attempt: int = 0
    launcher: str = "single"

    @property
    def name(self) -> str:
        """`student 0`, `teacher 2`: what messages and log files call this process."""
        if self.role == STUDENT:
            return f"student {self.rank}"
        return f"teacher {self.replica}" if self.size == 1 else f"teacher {self.replica}.{self.rank}"


def under_launcher(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return which launcher started this process as one of several ranks, or None for a bare start."""
    if "DISAGGKD_ROLE" in environment:
        return "disaggkd"
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return "torchrun"
    if "SLURM_PROCID" in environment and int(environment.get("SLURM_NTASKS", "1")) > 1:
        return "slurm"
    return None


def find_place(config: Config, command: str, environment: Mapping[str, str] = os.environ) -> Place:
    """Return this process's place.

    Args:
        config: the run.
        command: `run`, `student` or `teacher`.
        environment: the process's variables.

    Raises:
        UserError: when the launcher's ranks do not add up to what the config asks for.
    """
    launcher = under_launcher(environment)
    if launcher == "disaggkd":
        return _from_supervisor(environment)
    if launcher is None:
        role = TEACHER if command == TEACHER else STUDENT
        return Place(role, endpoint=config.launch.rendezvous, hosts_store=role == STUDENT)
    world = _torchrun_world(environment) if launcher == "torchrun" else _slurm_world(environment)
    rank, size, local_rank, local_size, endpoint, hosts, attempt = world
    common = {"local_rank": local_rank, "local_size": local_size, "attempt": attempt, "launcher": launcher}
    if command == "run":
        needed = config.student.ranks + config.teacher_ranks
        if size != needed:
            raise UserError(
                f"{launcher} started {size} ranks, but the config needs {needed}: student.ranks={config.student.ranks}"
                f" and {config.teacher_ranks} for teachers; start {needed}, or change student.ranks or teacher.replicas"
            )
        if rank < config.student.ranks:
            return Place(STUDENT, rank, config.student.ranks, endpoint=endpoint, hosts_store=hosts, **common)
        replica, within = divmod(rank - config.student.ranks, config.teacher.ranks_per_replica)
        return Place(
            TEACHER, within, config.teacher.ranks_per_replica, replica, endpoint=endpoint, hosts_store=hosts, **common
        )
    needed = config.student.ranks if command == STUDENT else config.teacher.ranks_per_replica
    key = "student.ranks" if command == STUDENT else "teacher.ranks_per_replica"
    if size != needed:
        raise UserError(f"{launcher} started {size} ranks of the {command}, but {key}={needed}; make them equal")
    hosts = command == STUDENT and rank == 0
    return Place(command, rank, size, endpoint=config.launch.rendezvous, hosts_store=hosts, **common)


def child_environment(place: Place, base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that tell a process started by the supervisor who it is."""
    variables = {
        "DISAGGKD_ROLE": place.role,
        "DISAGGKD_REPLICA": str(place.replica),
        "DISAGGKD_ATTEMPT": str(place.attempt),
        "DISAGGKD_ENDPOINT": place.endpoint or "",
        "DISAGGKD_HOSTS_STORE": str(int(place.hosts_store)),
        "DISAGGKD_LISTEN_FD": "" if place.listen_fd is None else str(place.listen_fd),
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
    }
    return {**base, **variables}


def threads_for(config: Config, place: Place) -> int:
    """Return the CPU threads of this rank: the configured number, or this machine's cores shared out evenly."""
    if config.launch.threads != "auto":
        return int(config.launch.threads)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // place.local_size)


def keep_to_loopback(config: Config, place: Place) -> None:
    """Bind gloo's listeners to the loopback interface, unless the config opens them or the user chose an interface.

    Raises:
        UserError: when ranks run on several machines, which loopback cannot reach.
    """
    if config.launch.bind == "loopback":
        if place.size > place.local_size:
            raise UserError(
                f"launch.bind: loopback keeps every listener on its machine, but {place.size} ranks of the {place.role}"
                f" run on several ({place.local_size} here); set launch.bind=all, or an address of the right network"
            )
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def _number(environment: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environment.get(name, default)
    try:
        return int(text)
    except (TypeError, ValueError):
        raise UserError(f"the launcher's variable {name} is {text!r}, no number; start under torchrun") from None


def _from_supervisor(environment: Mapping[str, str]) -> Place:
    descriptor = environment.get("DISAGGKD_LISTEN_FD", "")
    return Place(
        role=environment["DISAGGKD_ROLE"],
        rank=_number(environment, "RANK"),
        size=_number(environment, "WORLD_SIZE"),
        replica=_number(environment, "DISAGGKD_REPLICA"),
        local_rank=_number(environment, "LOCAL_RANK"),
        local_size=_number(environment, "LOCAL_WORLD_SIZE"),
        endpoint=environment["DISAGGKD_ENDPOINT"] or None,
        hosts_store=environment["DISAGGKD_HOSTS_STORE"] == "1",
        listen_fd=int(descriptor) if descriptor else None,
        attempt=_number(environment, "DISAGGKD_ATTEMPT"),
        launcher="disaggkd",
    )


def _torchrun_world(environment: Mapping[str, str]) -> tuple[int, int, int, int, str, bool, int]:
    rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if not host or not port:
        raise UserError("RANK and WORLD_SIZE are set, but MASTER_ADDR and MASTER_PORT are not; start under torchrun")
    agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return (
        rank,
        size,
        _number(environment, "LOCAL_RANK", "0"),
        _number(environment, "LOCAL_WORLD_SIZE", str(size)),
        f"{host}:{port}",
        rank == 0 and not agent,
        _number(environment, "TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _slurm_world(environment: Mapping[str, str]) -> tuple[int, int, int, int, str, bool, int]:
    rank, size = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_NTASKS")
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    host = environment.get("MASTER_ADDR") or _first_host(nodes)
    port = environment.get("MASTER_PORT") or str(20000 + _number(environment, "SLURM_JOB_ID", "0") % 20000)
    per_node = environment.get("SLURM_NTASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", str(size))
    return (
        rank,
        size,
        _number(environment, "SLURM_LOCALID", "0"),
        int(per_node.split("(")[0].split(",")[0]),
        f"{host}:{port}",
        rank == 0,
        _number(environment, "SLURM_RESTART_COUNT", "0"),
    )


def _first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list, as `scontrol show hostnames` spells it out."""
    try:
        listing = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=30, check=True
        )
        return listing.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        raise UserError(
            f"cannot tell the first host of SLURM's node list {nodes!r} (is scontrol there?); set MASTER_ADDR"
        ) from None
