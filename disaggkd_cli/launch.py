"""Who this process is: its role, its rank, and where the others are. The only reader of the launcher's variables.

Three launchers are understood. `torchrun` and SLURM start one world of ranks: the first `student.ranks` of it are the
student, the rest teachers. Bare `disaggkd run` starts the ranks itself (see `supervise`) and tells each who it is.
`disaggkd teacher` and `disaggkd student` started apart meet at `launch.rendezvous`; inside one SLURM job they find it
in the node list: the student's first node, and a port that follows from the job's number.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from disaggkd_cli.addresses import (
    interface_address,
    interface_of,
    is_loopback,
    loopback_address,
    resolve_bind,
    split_endpoint,
)
from disaggkd_cli.config import Config
from disaggkd_cli.errors import UserError
from disaggkd_cli.nodelist import expand_counts, expand_hosts

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
        attempt: how often the ranks (of this replica, for a teacher) were restarted as a whole.
        world_endpoint: where the ranks of this replica meet each other, when that is not `endpoint`.
        hosts_world: whether this process serves the store at `world_endpoint` (on `listen_fd`, where there is one).
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
    world_endpoint: str | None = None
    hosts_world: bool = False

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
    if "SLURM_PROCID" in environment and (_slurm_tasks(environment) > 1 or _number(environment, "SLURM_PROCID") > 0):
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
        replica = _number(environment, "SLURM_ARRAY_TASK_ID", "0") if role == TEACHER else 0
        return Place(role, replica=replica, endpoint=config.launch.rendezvous, hosts_store=role == STUDENT)
    needed = config.student.ranks + (config.teacher_ranks if command == "run" else 0)
    if launcher == "torchrun":
        world = _torchrun_world(environment)
    else:
        world = _slurm_world(environment, needed if command == "run" else _slurm_tasks(environment))
    endpoint = _local_endpoint(world) if config.launch.bind == "loopback" else world.endpoint
    common = {
        "local_rank": world.local_rank,
        "local_size": world.local_size,
        "attempt": world.attempt,
        "launcher": launcher,
    }
    per_replica = config.teacher.ranks_per_replica
    if command == "run":
        if world.size != needed:
            raise UserError(
                f"{launcher} started {world.size} ranks, but the config needs {needed}: "
                f"student.ranks={config.student.ranks} and {config.teacher_ranks} for teachers; "
                f"start {needed}, or change student.ranks or teacher.replicas"
            )
        hosts = world.hosts_store
        if world.rank < config.student.ranks:
            return Place(STUDENT, world.rank, config.student.ranks, endpoint=endpoint, hosts_store=hosts, **common)
        replica, within = divmod(world.rank - config.student.ranks, per_replica)
        return Place(TEACHER, within, per_replica, replica, endpoint=endpoint, hosts_store=hosts, **common)
    meeting = config.launch.rendezvous
    if command == STUDENT:
        if world.size != needed:
            raise UserError(
                f"{launcher} started {world.size} ranks of the student, but student.ranks={config.student.ranks}; "
                "make them equal"
            )
        return Place(STUDENT, world.rank, world.size, endpoint=meeting, hosts_store=world.rank == 0, **common)
    if world.size % per_replica:
        raise UserError(
            f"{launcher} started {world.size} ranks of the teacher, no multiple of "
            f"teacher.ranks_per_replica={per_replica}; start a multiple, or change that key"
        )
    first = _number(environment, "SLURM_ARRAY_TASK_ID", "0") * (world.size // per_replica)
    replica, within = divmod(world.rank, per_replica)
    if launcher == "slurm":  # whose port for this job is the student's, which may be a step on the same node
        host, port = split_endpoint(endpoint)
        endpoint = f"{host}:{port + 1}"
    return Place(
        TEACHER, within, per_replica, first + replica, endpoint=meeting, world_endpoint=endpoint,
        hosts_world=world.hosts_store, **common,
    )  # fmt: skip


def discover_rendezvous(config: Config, command: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return where `disaggkd student` and `disaggkd teacher` meet: the config's `launch.rendezvous`, else what SLURM's
    variables tell, else None.

    A SLURM job of several components (a heterogeneous job) has the student in its first one; both roles find it there.
    A student's own job is where it runs. A teacher's own job cannot tell where the student's is.

    Raises:
        UserError: the node list cannot be read, or spans machines while `launch.bind` is loopback.
    """
    supervised = "DISAGGKD_ROLE" in environment
    if config.launch.rendezvous or command == "run" or supervised or "SLURM_JOB_ID" not in environment:
        return config.launch.rendezvous
    components = _number(environment, "SLURM_HET_SIZE", "1")
    if components > 1:
        lists = [environment.get(f"SLURM_JOB_NODELIST_HET_GROUP_{index}", "") for index in range(components)]
    elif command == STUDENT:
        lists = [_node_list(environment)]
    else:
        return None
    hosts = [_hosts(nodes) for nodes in lists]
    host = hosts[0][0]
    if config.launch.bind == "loopback":
        if len({name for names in hosts for name in names}) > 1:
            raise UserError(
                f"launch.bind: loopback keeps every listener on its machine, but this SLURM job spans {lists}; set "
                "launch.bind=all, or the name or address of an interface"
            )
        host = loopback_address()
    return f"{host}:{_slurm_port(environment)}"


def child_environment(place: Place, base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that tell a process started by the supervisor who it is."""
    variables = {
        "DISAGGKD_ROLE": place.role,
        "DISAGGKD_REPLICA": str(place.replica),
        "DISAGGKD_ATTEMPT": str(place.attempt),
        "DISAGGKD_ENDPOINT": place.endpoint or "",
        "DISAGGKD_HOSTS_STORE": str(int(place.hosts_store)),
        "DISAGGKD_WORLD_ENDPOINT": place.world_endpoint or "",
        "DISAGGKD_HOSTS_WORLD": str(int(place.hosts_world)),
        "DISAGGKD_LISTEN_FD": "" if place.listen_fd is None else str(place.listen_fd),
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
    }
    return {**base, **variables}


def threads_for(config: Config, place: Place) -> int:
    """Return the CPU threads of this rank: the configured number, or this machine's cores shared out by work.

    A step of the student (forward, head, backward) costs about three forwards of as large a teacher, which then waits.
    So where the whole run is on one machine, its students share all cores, and its teachers half as many beside them.
    """
    if config.launch.threads != "auto":
        return int(config.launch.threads)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    students, teachers = config.student.ranks, config.teacher_ranks
    if teachers and place.local_size == students + teachers:
        return max(1, cores // students if place.role == STUDENT else cores // (2 * teachers))
    return max(1, cores // place.local_size)


def settle_interfaces(config: Config, place: Place) -> None:
    """Point gloo's and NCCL's sockets at the interface that `launch.bind` means, unless the user's variables do.

    With `loopback` that is `lo`; with an interface's name or address that interface; with `all`, where ranks run on
    several machines, the one that leads to the rendezvous. Both libraries then use the same one.

    Raises:
        UserError: an interface that this machine lacks, or `loopback` where ranks run on several machines.
    """
    bind = config.launch.bind
    if bind == "loopback":
        if place.size > place.local_size:
            raise UserError(
                f"launch.bind: loopback keeps every listener on its machine, but {place.size} ranks of the {place.role}"
                f" run on several ({place.local_size} here); set launch.bind=all, or an address of the right network"
            )
        if place.endpoint:
            resolve_bind(bind, place.endpoint)  # refuses a rendezvous elsewhere
        interface = "lo"
    elif bind in ("all", "auto"):
        spans = place.size > place.local_size or (place.endpoint and not is_loopback(split_endpoint(place.endpoint)[0]))
        found = resolve_bind("all", place.endpoint) if spans and place.endpoint else "auto"
        interface = interface_of(found) if found != "auto" and not is_loopback(found) else None
    else:
        interface = interface_of(interface_address(bind) or bind)
        if interface is None:
            raise UserError(f"launch.bind={bind}: is neither an interface of this machine nor an address of one")
    if interface:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, interface)


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
        world_endpoint=environment.get("DISAGGKD_WORLD_ENDPOINT") or None,
        hosts_world=environment.get("DISAGGKD_HOSTS_WORLD") == "1",
    )


@dataclass(frozen=True)
class _World:
    """The world of ranks that a launcher started, and this process's place in it."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    endpoint: str
    hosts_store: bool
    attempt: int


def _local_endpoint(world: _World) -> str:
    """The world's endpoint, on loopback where all of its ranks run on this machine."""
    host, port = split_endpoint(world.endpoint)
    if world.local_size < world.size or is_loopback(host):
        return world.endpoint
    return f"{loopback_address()}:{port}"


def _torchrun_world(environment: Mapping[str, str]) -> _World:
    rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if not host or not port:
        raise UserError("RANK and WORLD_SIZE are set, but MASTER_ADDR and MASTER_PORT are not; start under torchrun")
    if not 0 <= rank < size:
        raise UserError(f"RANK={rank} lies outside WORLD_SIZE={size}; start all ranks with one torchrun command")
    agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return _World(
        rank,
        size,
        _number(environment, "LOCAL_RANK", "0"),
        _number(environment, "LOCAL_WORLD_SIZE", str(size)),
        f"{host}:{port}",
        rank == 0 and not agent,
        _number(environment, "TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _slurm_world(environment: Mapping[str, str], needed: int) -> _World:
    """The ranks of this job step.

    In a step over all components of a heterogeneous job SLURM numbers ranks and nodes through (slurmstepd adds each
    component's offsets to SLURM_PROCID and SLURM_NODEID), but counts tasks by component. So a step that does not have
    the `needed` ranks by itself is read as one over all components.
    """
    rank, size = _number(environment, "SLURM_PROCID"), _slurm_tasks(environment)
    nodes, tasks = _node_list(environment), _tasks_per_node(environment)
    components = _number(environment, "SLURM_HET_SIZE", "1")
    if components > 1 and size != needed:
        groups = range(components)
        nodes = ",".join(environment.get(f"SLURM_JOB_NODELIST_HET_GROUP_{index}", "") for index in groups)
        tasks = [count for index in groups for count in _counts(environment, f"SLURM_TASKS_PER_NODE_HET_GROUP_{index}")]
        size = sum(tasks)
    if tasks and sum(tasks) != size:
        raise UserError(
            f"SLURM says that this step has {size} tasks, but those of its nodes are {tasks}; start it with srun, and "
            "give --ntasks or --ntasks-per-node once"
        )
    if not 0 <= rank < size:
        raise UserError(f"SLURM_PROCID={rank} lies outside this step's {size} tasks; start the ranks with srun")
    node = _number(environment, "SLURM_NODEID", "0")
    host = environment.get("MASTER_ADDR") or _hosts(nodes)[0]
    port = environment.get("MASTER_PORT") or str(_slurm_port(environment))
    return _World(
        rank,
        size,
        _number(environment, "SLURM_LOCALID", "0"),
        tasks[node] if node < len(tasks) else size,
        f"{host}:{port}",
        rank == 0,
        _number(environment, "SLURM_RESTART_COUNT", "0"),
    )


def _slurm_tasks(environment: Mapping[str, str]) -> int:
    name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    return _number(environment, name, "1")


def _node_list(environment: Mapping[str, str]) -> str:
    return environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")


def _tasks_per_node(environment: Mapping[str, str]) -> list[int]:
    step = "SLURM_STEP_TASKS_PER_NODE"
    return _counts(environment, step if step in environment else "SLURM_TASKS_PER_NODE")


def _counts(environment: Mapping[str, str], name: str) -> list[int]:
    if not environment.get(name):
        return []
    try:
        return expand_counts(environment[name])
    except ValueError as error:
        raise UserError(f"the launcher's variable {name} cannot be read: {error}") from None


def _slurm_port(environment: Mapping[str, str]) -> int:
    """A port below those that systems hand out by themselves, the same for all of a job."""
    return 15000 + _number(environment, "SLURM_JOB_ID", "0") % 15000


def _hosts(nodes: str) -> list[str]:
    """Return the hosts of a SLURM node list; `scontrol` is asked only for what is not of the documented form."""
    try:
        return expand_hosts(nodes)
    except ValueError as error:
        cause = error
    try:
        listing = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=30, check=True
        )
        if listing.stdout.split():
            return listing.stdout.split()
    except (OSError, subprocess.SubprocessError) as error:
        cause = ValueError(f"{cause}; scontrol: {error}")
    raise UserError(
        f"cannot tell the hosts of SLURM's node list {nodes!r} ({cause}); set MASTER_ADDR, or launch.rendezvous where "
        "the roles are jobs of their own"
    )
