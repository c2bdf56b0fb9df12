"""Run all checks, one after the other; one that fails does not keep the others from running."""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import transformers

from disaggkd_cli.addresses import loopback_address
from disaggkd_cli.checks.attention import check_determinism, check_packing
from disaggkd_cli.checks.checkpoint import check_checkpoint
from disaggkd_cli.checks.gradients import check_gradients
from disaggkd_cli.checks.heads import check_student_head, check_teacher_head
from disaggkd_cli.checks.loss import check_fused, check_zero
from disaggkd_cli.checks.memory import check_memory
from disaggkd_cli.checks.result import FAIL, CheckResult
from disaggkd_cli.checks.sampling import check_sampling
from disaggkd_cli.checks.subject import Subject, load_subject
from disaggkd_cli.checks.teacher import check_teacher
from disaggkd_cli.checks.texts import check_labels, check_masks, check_vocabulary
from disaggkd_cli.checks.wire import check_remote
from disaggkd_cli.config import Config
from disaggkd_cli.config.on_policy import student_writes
from disaggkd_cli.errors import DisaggkdError, UserError
from disaggkd_cli.launch import STUDENT, Place, settle_interfaces, threads_for
from disaggkd_cli.transport import open_store

CHECKS: dict[str, Callable[..., CheckResult]] = {
    "vocabulary": check_vocabulary,
    "labels": check_labels,
    "masks": check_masks,
    "teacher": check_teacher,
    "teacher head": check_teacher_head,
    "student head": check_student_head,
    "packing leak": check_packing,
    "teacher determinism": check_determinism,
    "remote states": check_remote,
    "zero loss": check_zero,
    "fused loss": check_fused,
    "gradients": check_gradients,
    "plan's memory": check_memory,
    "checkpoint": check_checkpoint,
}
"""By name, in the order in which they run. The last one changes the student. Beside them, where the student writes,
`sampling`."""

SLOW = ("fused loss", "gradients", "checkpoint")
"""Those that compute in float64, step the student, or write it; all others take seconds."""

_GROUP_SECONDS = 120


def run_checks(
    config: Config,
    only: list[str] | None = None,
    log: Callable[[str], None] = lambda line: None,
    ended: Callable[[CheckResult], None] = lambda result: None,
) -> list[CheckResult]:
    """Load what `config` names and check it, in this one process, on a GPU where there is one.

    Args:
        only: names of CHECKS; all by default.
        log: told what is being done.
        ended: told each result as it comes.

    Raises:
        UserError: the config's models or texts cannot be read at all, or `only` names no check.
    """
    checks = {"sampling": check_sampling, **CHECKS} if student_writes(config) else CHECKS
    unknown = sorted(set(only or []) - set(checks))
    if unknown:
        raise UserError(
            f"--only: {', '.join(unknown)} is no check; there are {', '.join(checks)}; "
            f"all but {', '.join(SLOW)} take seconds"
        )
    place = Place(STUDENT, endpoint=f"{loopback_address()}:0", hosts_store=True)
    settle_interfaces(config, place)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads_for(config, place))
    transformers.utils.logging.disable_progress_bar()
    try:
        subject = load_subject(config, _device(config), log)
        results = []
        for name in checks:
            if only is None or name in only:
                results.append(_run(name, checks[name], subject, log))
                ended(results[-1])
        return results
    finally:
        torch.set_num_threads(threads)


def _device(config: Config) -> torch.device:
    if config.launch.device == "cuda" and not torch.cuda.is_available():
        raise UserError("launch.device: cuda is asked for, but torch sees no GPU here; use auto or cpu")
    return torch.device("cuda" if config.launch.device != "cpu" and torch.cuda.is_available() else "cpu")


def _run(name: str, check: Callable[..., CheckResult], subject: Subject, log: Callable[[str], None]) -> CheckResult:
    log(f"checking: {name}")
    started = time.monotonic()
    try:
        result = _call(check, subject)
    except DisaggkdError as error:
        result = CheckResult(FAIL, "", str(error))
    except Exception as error:
        # A fault in one check is its result; the others still have something to say.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        result = CheckResult(FAIL, "could not be carried out", " ".join(message.split()))
    return dataclasses.replace(result, name=name, seconds=time.monotonic() - started)


def _call(function: Callable[..., CheckResult], subject: Subject) -> CheckResult:
    if function not in (check_remote, check_checkpoint):
        return function(subject)
    store = open_store(f"{loopback_address()}:0", host_it=True)
    if function is check_remote:
        return function(subject, store)
    backend = "cpu:gloo,cuda:nccl" if subject.device.type == "cuda" else "gloo"
    wait = timedelta(seconds=_GROUP_SECONDS)
    dist.init_process_group(backend, store=dist.PrefixStore("check", store), rank=0, world_size=1, timeout=wait)
    try:
        return function(subject)
    finally:
        dist.destroy_process_group()
