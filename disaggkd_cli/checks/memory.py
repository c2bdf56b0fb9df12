"""Does the plan's memory fit this machine?"""

from __future__ import annotations

import psutil
import torch

from disaggkd_cli.checks.result import CheckResult, judge, not_applicable
from disaggkd_cli.checks.subject import Subject
from disaggkd_cli.config import Config
from disaggkd_cli.errors import UserError
from disaggkd_cli.planner.fit import roles_of
from disaggkd_cli.planner.inputs import workload_of
from disaggkd_cli.units import format_bytes


def check_memory(subject: Subject) -> CheckResult:
    """Compare what `plan` expects of each rank with the memory here."""
    try:
        work = workload_of(subject.config)
    except UserError as error:
        return not_applicable(f"there is no plan for these models: {error}")
    train = subject.splits.train.sample
    work = work.with_(supervised=float(train.supervised_counts.sum()) / train.token_count)
    peaks = {role: memory.peak_bytes for role, memory in roles_of(work, plan_mode(subject.config)).items()}
    figures = ", ".join(f"{role} {format_bytes(peak)}" for role, peak in peaks.items())
    values = {f"{role}_peak_bytes": round(peak) for role, peak in peaks.items()}
    if subject.device.type == "cuda":
        total = torch.cuda.get_device_properties(subject.device).total_memory
        return judge(
            max(peaks.values()) <= total,
            f"{figures}; a GPU here has {format_bytes(total)}",
            "the plan's peak of each rank against this machine's GPU",
            "a rank will not fit a GPU like this one; `disaggkd plan` names what to change",
            here_bytes=total,
            **values,
        )
    if subject.config.launch.rendezvous:
        peaks = {role: peak for role, peak in peaks.items() if role != "teacher"}
    needed = sum(peak * _ranks(subject.config, role) for role, peak in peaks.items())
    total = psutil.virtual_memory().total
    return judge(
        needed <= total,
        f"{figures}; all ranks {format_bytes(needed)} of {format_bytes(total)} here",
        "the plan's tensors of all ranks that a bare run starts, against this machine's memory (no GPU here)",
        "the ranks will not fit this machine; `disaggkd plan` says what they need and what to change",
        needed_bytes=round(needed),
        here_bytes=total,
        **values,
    )


def plan_mode(config: Config) -> str:
    """Return the planner's name of the config's mode."""
    if config.mode == "colocated":
        return "colocated_full" if config.loss.implementation == "full" else "colocated_fused"
    return "disaggregated_fused"


def _ranks(config: Config, role: str) -> int:
    return config.teacher_ranks if role == "teacher" else config.student.ranks
