"""Student ranks of several colocated runs, one run after the other in processes that start once."""

from __future__ import annotations

import contextlib
import io
import socket
import traceback
from pathlib import Path

import torch

from disaggkd_cli.config import load
from disaggkd_cli.launch import Place
from disaggkd_cli.student import run_student
from disaggkd_cli.training.run_directory import prepare
from tests.support.spawn import spawn

Job = tuple[Path, Path, tuple[str, ...]]
"""A config file, a run directory, and overrides."""


def run_together(ranks: int, jobs: list[Job]) -> None:
    """Run each job on `ranks` student ranks, as `disaggkd run mode=colocated` would; a rank's failure goes to
    `failed.RANK` in its run directory."""
    ports = [_free_port() for _ in jobs]
    spawn(_rank_main, (ranks, jobs, ports), ranks)


def _rank_main(rank: int, ranks: int, jobs: list[Job], ports: list[int]) -> None:
    torch.set_num_threads(1)
    for (config_file, run_dir, overrides), port in zip(jobs, ports, strict=True):
        arguments = [f"run_dir={run_dir}", "mode=colocated", f"student.ranks={ranks}", *overrides]
        place = Place("student", rank, ranks, 0, rank, ranks, f"127.0.0.1:{port}", rank == 0, launcher="disaggkd")
        try:
            config = load(str(config_file), arguments)
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                run_student(config, place, prepare(config.run_dir, "", resume=True), "never")
        except BaseException:
            (run_dir / f"failed.{rank}").write_text(traceback.format_exc())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
