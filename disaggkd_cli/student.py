"""One student rank: build everything, train, export. It owns the data order and all resume state."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

from disaggkd_cli.config import Config
from disaggkd_cli.config.linear_attention import missing_kernels
from disaggkd_cli.errors import DisaggkdError, SavedAndResumable, UserError
from disaggkd_cli.launch import Place, threads_for
from disaggkd_cli.layouts import AUTO, PIPELINE
from disaggkd_cli.layouts.stages import idle_for_want_of_requests
from disaggkd_cli.models.load import DTYPES
from disaggkd_cli.planner.models import local_fields
from disaggkd_cli.runtime import init_group, logger, meet, run_secret, set_up
from disaggkd_cli.training.build import build_components, build_module, open_source
from disaggkd_cli.training.checkpoint import Checkpointer, load_training_state
from disaggkd_cli.training.export import export_student
from disaggkd_cli.training.fixed_prompts import fixed_prompts
from disaggkd_cli.training.loop import Training, train
from disaggkd_cli.training.metrics import MetricsLog, read_metrics
from disaggkd_cli.training.on_policy import open_writer
from disaggkd_cli.training.process import StopSignals
from disaggkd_cli.training.progress import RunProgress
from disaggkd_cli.training.publish import card_of, push_to_hub
from disaggkd_cli.training.resume import changed_settings, choose_checkpoint
from disaggkd_cli.training.run_directory import RunDirectory, Status, write_environment
from disaggkd_cli.training.samples import SamplesTable, read_samples
from disaggkd_cli.training.schedule import WorkPlan
from disaggkd_cli.training.stage_record import read_stage_records
from disaggkd_cli.training.timeline import open_timeline
from disaggkd_cli.training.tracking import wanted_trackers
from disaggkd_cli.transport import StopReason, split_endpoint
from disaggkd_cli.transport.listeners import deafen_all_but
from disaggkd_cli.transport.rendezvous import store_endpoint


def run_student(config: Config, place: Place, directory: RunDirectory, resume: str) -> None:
    """Train this rank of the student to the end, export it, and record how it ended in `status.json`.

    Args:
        config: the run, checked.
        place: this rank's place.
        directory: where the run leaves everything; prepared.
        resume: `never`, `auto`, or the path of a checkpoint.

    Raises:
        UserError, RunError, SavedAndResumable: see `errors`; the message is meant for a person.
    """
    status = Status("running")
    leader = place.rank == 0

    def record() -> None:
        if leader:
            status.teacher_stages = [asdict(stage) for stage in read_stage_records(directory.logs)]
            status.write(directory)

    record()
    try:
        _run(config, place, directory, resume, status, record)
        done = "; ".join(filter(None, ("all steps done", status.reason)))
        status.state, status.exit_code, status.reason, status.resumable = "finished", 0, done, False
    except SavedAndResumable as stop:
        status.state, status.exit_code, status.reason, status.resumable = "stopped", stop.exit_code, str(stop), True
        raise
    except DisaggkdError as error:
        status.state, status.exit_code, status.reason = "failed", error.exit_code, str(error)
        raise
    except BaseException as error:
        status.state, status.exit_code, status.reason = "failed", 1, f"{type(error).__name__}: {error}"
        raise
    finally:
        record()


def _run(
    config: Config, place: Place, directory: RunDirectory, resume: str, status: Status, record: Callable[[], None]
) -> None:
    signals = StopSignals()
    device = set_up(config, place, directory)
    wanted_trackers(config.log)  # a missing client is said before anything is loaded
    store = meet(config, place, timeout=config.transport.timeout)
    leader = place.rank == 0
    secret = run_secret(config, store, makes=leader)
    init_group(config, place, store, device)
    progress = RunProgress(config.train.steps, visible=leader)

    def log(line: str) -> None:
        logger.info(line)
        progress.log(line)

    threads = threads_for(config, place)
    log(f"{place.size} student ranks, {config.teacher_ranks} teacher ranks; {threads} CPU threads a rank")
    slow = missing_kernels(config, local_fields) if device.type == "cuda" else []
    for line in (*slow, *filter(None, [_idle_stages(config)])):
        log(f"warning: {line}")
    components = build_components(config, log, directory.root, device)
    module, optimizer = build_module(config, components, device, log)
    checkpoint = choose_checkpoint(directory.checkpoints, resume, components.identity, log)
    checkpointer = Checkpointer(
        directory.checkpoints, config.train.keep_checkpoints, dist.new_group(backend="gloo"), config.train.save_timeout
    )
    done = 0
    if checkpoint is not None:
        load_training_state(checkpoint, module, optimizer, checkpointer.group)
        done = checkpoint.step
        checkpointer.started_step = done
        log(f"resuming after step {done} from {checkpoint.directory}")
        status.changed = changed_settings(checkpoint, components.identity)
        for line in status.changed:
            log(f"warning: {line}")
        if done > config.train.steps:
            raise UserError(
                f"train.steps: is {config.train.steps}, but {checkpoint.directory} is from after step {done}; "
                "set more steps, or start in another run_dir"
            )
    status.last_step, status.resumable = done, checkpoint is not None
    record()
    evaluations = _recorded_evaluations(directory, done)
    metrics = table = None
    if leader:
        write_environment(directory, _versions(), _placement(config, place, device))
        metrics = MetricsLog(directory, done, config.log, log)
        table = SamplesTable(directory.samples, done, log, metrics.write_samples)
    samples = fixed_prompts(
        config, components.splits.evaluation, components.tokenizer, module.teacher_head, components.pad_id, table,
        read_samples(directory.samples), components.layout.vocabulary_parallel, log,
    )  # fmt: skip
    writer = open_writer(
        config, components.splits.train, components.writer_copy, components.tokenizer, components.shared_ids,
        components.pad_id, device, checkpoint,
    )  # fmt: skip
    plan = WorkPlan(
        config,
        writer.texts if writer else components.splits.train,
        components.splits.evaluation,
        place.rank,
        components.pad_id,
    )
    deafen_all_but(split_endpoint(store_endpoint(store))[1])
    left = done < config.train.steps
    timeline = open_timeline(config, directory, place.name)
    source, pool = open_source(
        config, components, place.rank, store, device, plan.items(done), log, secret=secret, wait=left,
        asked=timeline.asked,
    )  # fmt: skip
    run = Training(
        config, module, optimizer, plan, source, checkpointer, components.identity, device, signals, progress, metrics,
        evaluations.__setitem__, samples, writer, done, timeline=timeline,
    )  # fmt: skip
    # A student that fails may be started again, so its teachers are told to stay unless it says otherwise.
    reason = StopReason.LINK_CLOSED
    progress.start(done)
    try:
        train(run)
        reason = StopReason.FINISHED
    except SavedAndResumable:
        reason = StopReason.STOPPED
        raise
    finally:
        status.last_step = run.done
        progress.close()
        if writer is not None:
            writer.texts.close()
        source.close()
        if pool is not None:
            pool.close(reason)
            status.other_bits = [name for name, known in pool.stats().items() if known["other_bits"]]
        if metrics is not None:
            metrics.close()
    card = card_of(config, directory, run.done) if leader else ""
    export_student(module.model, components.tokenizer, directory.export, DTYPES[config.export.dtype], card)
    if evaluations:
        progress.before_and_after(evaluations[min(evaluations)], evaluations[max(evaluations)])
    log(f"the student lies in {directory.export}")
    dist.barrier()
    dist.destroy_process_group()
    if leader:
        status.reason = push_to_hub(config, directory.export, log)


def _idle_stages(config: Config) -> str:
    """Say so where the ring is too shallow for the stages of its teachers."""
    teacher = config.teacher
    if not config.teacher_ranks or teacher.parallelism not in (AUTO, PIPELINE):
        return ""
    stages = teacher.ranks_per_replica
    return idle_for_want_of_requests(config.transport.ring_depth, config.student.ranks, stages, teacher.replicas)


def _recorded_evaluations(directory: RunDirectory, done: int) -> dict[int, dict[str, float]]:
    lines = read_metrics(directory.metrics)
    return {line["step"]: line for line in lines if "eval_kd" in line and line["step"] <= done and done > 0}


def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "transformers", "datasets", "safetensors", "omegaconf"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # datasets is needed for some kinds of data only
            found[name] = "not installed"
    return found


def _placement(config: Config, place: Place, device: torch.device) -> dict[str, Any]:
    return {
        "launcher": place.launcher,
        "attempt": place.attempt,
        "student_ranks": config.student.ranks,
        "teacher_ranks": config.teacher_ranks,
        "device": str(device),
        "threads_per_rank": threads_for(config, place),
        "process": os.getpid(),
    }
