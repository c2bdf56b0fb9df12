"""What every rank sets up before it works: threads, device, log file, signals, process group."""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from disaggkd_cli.addresses import loopback_address
from disaggkd_cli.config import Config
from disaggkd_cli.config.by_device import student_dtype
from disaggkd_cli.errors import UserError
from disaggkd_cli.launch import TEACHER, Place, settle_interfaces, threads_for
from disaggkd_cli.secret import await_secret, read_secret
from disaggkd_cli.training.layout import group_timeout
from disaggkd_cli.training.process import cap_gpu_memory, keep_memory_record
from disaggkd_cli.training.run_directory import RunDirectory, log_path
from disaggkd_cli.transport import Secret, open_store
from disaggkd_cli.transport.authentication import tell_secret_file, told_secret_file
from disaggkd_cli.transport.nccl_environment import prepare_nccl_environment
from disaggkd_cli.units import printable

logger = logging.getLogger("disaggkd")


def set_up(config: Config, place: Place, directory: RunDirectory | None) -> torch.device:
    """Set threads and interfaces, open this rank's log and memory record, and return the device that it computes on.

    Raises:
        UserError: when `launch.device=cuda` and there is no GPU for this rank, or too few for its role.
    """
    if place.role == TEACHER:
        # SLURM and torchrun give every rank the signal that means "save and stop". A teacher has nothing to save, and
        # the student needs it for the step that it still finishes; it ends when the student says so.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    prepare_nccl_environment()
    raise_file_limit()
    settle_interfaces(config, place)
    open_log(place, directory)
    transformers.utils.logging.disable_progress_bar()
    threads = threads_for(config, place)
    torch.set_num_threads(threads)
    device = _device(config, place)
    logger.info("%s: process %d, %d threads, device %s", place.name, os.getpid(), threads, device)
    cap_gpu_memory(device)
    config.student.dtype = student_dtype(config, device.type)
    if directory is not None:
        keep_memory_record(directory.logs, place.name, device)
    return device


def raise_file_limit() -> None:
    """Let this process open as many files as it may, up to 65,536: the rank that serves the store holds two connections
    of every other rank, and every link is one more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _device(config: Config, place: Place) -> torch.device:
    wanted = config.launch.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("launch.device: cuda is asked for, but torch sees no GPU here; use auto or cpu")
    count = torch.cuda.device_count()
    together = min(place.size, place.local_size)
    # Under SLURM each task may see a device of its own only; then all of them are number 0 and differ all the same.
    if together > count and place.launcher != "slurm":
        raise UserError(
            f"{together} ranks of the {place.role} on a machine with {count} GPUs: ranks that share weights need "
            "a GPU each (NCCL refuses two on one); start fewer ranks here, or set launch.device=cpu"
        )
    device = torch.device("cuda", place.local_rank % count)
    torch.cuda.set_device(device)
    return device


class _LiteralFormatter(logging.Formatter):
    """Spells out what would steer the terminal of whoever reads the log."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def open_log(place: Place, directory: RunDirectory | None) -> None:
    """Send this rank's log to `logs/<role>_<rank>.log`, or to stderr where there is no run directory."""
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logging.raiseExceptions = False  # a full disk may cost log lines, but prints no traceback for each of them
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if directory is not None:
        directory.logs.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(log_path(directory, place.name), encoding="utf-8")
    formatter = _LiteralFormatter(f"%(asctime)s [{place.name}] %(message)s")
    formatter.converter = time.localtime
    handler.setFormatter(formatter)
    logger.handlers[:] = [handler]


def meet(config: Config, place: Place, *, timeout: float) -> dist.Store:
    """Return the store where all ranks of the run meet, serving it when this process is the one to.

    Raises:
        UserError: the port is taken, or there is nowhere to meet.
        RunError: nobody serves it within `timeout` seconds.
    """
    endpoint = place.endpoint
    if endpoint is None:
        if config.mode == "disaggregated":
            raise UserError(
                "launch.rendezvous: teachers and students started apart need a place to meet; set it to host:port"
            )
        endpoint = f"{loopback_address()}:0"
    store = open_store(endpoint, host_it=place.hosts_store, listen_fd=place.listen_fd, timeout=timeout)
    if place.launcher in ("torchrun", "slurm") and place.endpoint != config.launch.rendezvous:
        # The world's own store outlives a restart of all ranks; what they left in it must not be met again. At
        # launch.rendezvous other jobs meet, which count attempts of their own.
        return dist.PrefixStore(f"attempt/{place.attempt}", store)
    return store


def run_secret(config: Config, store: dist.Store, *, makes: bool = False) -> Secret:
    """Return the secret of the run: from `launch.secret_file`, or from the student's run directory once it is there.

    Args:
        store: the rendezvous; with `makes`, this rank tells others there where the file is.

    Raises:
        UserError: it did not come within `transport.teacher_wait` seconds, or cannot be used.
    """
    launch = config.launch
    if launch.secret == "none" or not config.teacher_ranks:
        return Secret()
    if launch.secret_file:
        return Secret(read_secret(Path(launch.secret_file).expanduser()))
    own = RunDirectory(Path(config.run_dir).expanduser().absolute()).secret
    if makes:
        tell_secret_file(store, own)

    def find() -> Path | None:
        return next((path for path in (own, told_secret_file(store, own.name)) if path and path.exists()), None)

    return Secret(await_secret(find, own, config.transport.teacher_wait, logger.info))


def init_group(config: Config, place: Place, store: dist.Store, device: torch.device) -> dist.ProcessGroup:
    """Form the default process group of this process's own role and return it."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
    prefix = f"world/{place.role}{place.replica if place.role == 'teacher' else ''}/{place.attempt}"
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(prefix, store),
        rank=place.rank,
        world_size=place.size,
        timeout=group_timeout(config),
        # Its communicator is formed now, before links form theirs beside it.
        device_id=device if device.type == "cuda" else None,
    )
    return dist.group.WORLD
