"""From a `Config` to the planner's `Workload`: the one place where config keys are read."""

from __future__ import annotations

from pathlib import Path

import yaml

from disaggkd_cli.config import Config
from disaggkd_cli.config.attention import unproved_with_packing
from disaggkd_cli.config.by_device import AUTO, student_dtype
from disaggkd_cli.config.layers import expected_layers
from disaggkd_cli.config.on_policy import student_writes
from disaggkd_cli.config.packing import separates_documents
from disaggkd_cli.errors import UserError
from disaggkd_cli.layouts import asked_layout, facts_of
from disaggkd_cli.losses.hidden_names import COSINE
from disaggkd_cli.planner.cluster import cluster_of
from disaggkd_cli.planner.models import hub_config, resolve_model
from disaggkd_cli.planner.models.parameters import count_parameters
from disaggkd_cli.planner.models.quantised import quantised_of
from disaggkd_cli.planner.models.router import balances_experts
from disaggkd_cli.planner.models.shapes import ModelShape
from disaggkd_cli.planner.models.trained import adapter_parameters, trained_share
from disaggkd_cli.planner.supervised import supervised_share
from disaggkd_cli.planner.workload import Efficiency, Workload, Writing, is_hybrid
from disaggkd_cli.units import parse_bytes
from disaggkd_cli.wire import format_of

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_CALIBRATED = {"teacher_time", "student_time", "reserve", "fixed_gib", "jitter", "run"}


def workload_of(config: Config, hardware: str | None = None, gpus: int | None = None) -> Workload:
    """Return what `config` asks to plan.

    Args:
        config: the typed config.
        hardware: a GPU or node name that overrides `hardware.gpu` (and the node's size and network).
        gpus: all GPUs there are: the split between teacher and student is then the planner's to choose (see
            `split.py`).

    Raises:
        UserError: an unknown model, GPU or node; a layout of the teacher that a run refuses; or keys that cannot go
            together.
    """
    if not config.teacher.model:
        raise UserError("teacher.model: missing; name the model to distil (a directory, a config.json, or a hub name)")
    teacher = resolve_model(config.teacher.model, "teacher.model")
    student = _student_shape(config, teacher)
    share, layer_share, head_trained = _trained(config, student)
    on_cpu = config.launch.device == "cpu"
    cluster = cluster_of(config, hardware)
    fields = hub_config(config.teacher.model, "teacher.model")
    quantised = quantised_of(
        fields, "teacher.model", architecture=cluster.teacher_gpu.architecture, on_cpu=cluster.device == "cpu"
    )
    gguf = config.teacher.model.endswith(".gguf")
    facts = facts_of(fields, config.teacher.model, quantization=quantised and quantised.method, gguf=gguf)
    work = Workload(
        teacher=teacher,
        teacher_facts=facts,
        quantised=quantised,
        supervised=_supervised(config),
        writing=_writing(config),
        student=student,
        cluster=cluster,
        efficiency=_efficiency(config),
        teacher_bytes=_BYTES[config.teacher.dtype],
        student_bytes=_BYTES[student_dtype(config, cluster.device)],
        student_ranks=gpus if gpus and config.mode == "colocated" else config.student.ranks,
        replicate=config.student.replicate,
        replicas=config.teacher.replicas,
        ranks_per_replica=config.teacher.ranks_per_replica,
        parallelism=asked_layout(config.teacher.parallelism, config.teacher.ranks_per_replica, facts)[0].parallelism,
        trained=share,
        layer_trained=layer_share,
        head_trained=head_trained,
        root_trained=config.student.lora is None,
        micro_batch_tokens=config.train.micro_batch_sequences * config.data.sequence_length,
        sequence=config.data.sequence_length,
        accumulation=config.train.accumulation,
        steps=config.train.steps,
        packed=_packed(config, teacher, student),
        checkpointing=config.student.activation_checkpointing == "full",
        divergence=config.loss.divergence,
        temperature=config.loss.temperature,
        implementation=config.loss.implementation,
        asked_budget=None if config.loss.memory_budget == AUTO else parse_bytes(config.loss.memory_budget),
        vocabulary_parallel=config.loss.vocabulary_parallel,
        ring_depth=config.transport.ring_depth,
        wire_bytes=_wire_bytes(config, teacher),
        links_per_rank=config.transport.links_per_rank,
        nccl_links=config.transport.backend != "gloo" and not on_cpu,
        delta_kernel="torch" if on_cpu else "fla",
        cached=config.teacher.cache is not None,
        teacher_attention=config.teacher.attention,
        student_attention=config.student.attention,
        compiled=config.student.compile,
        router_loss=_router_loss(config, student),
        hidden_loss=(config.loss.hidden_loss or COSINE) if config.loss.hidden_weight else None,
    )
    if work.refused and not gpus and config.mode != "colocated":
        raise UserError(work.refused)
    return work


def _trained(config: Config, student: ModelShape) -> tuple[float, float, bool]:
    """Trained parameters as shares of all and of the largest layer's, and whether the head is trained."""
    if config.student.lora is None:
        share, head_trained = trained_share(student, config.student.freeze)
        return share, 1.0 if share else 0.0, head_trained
    parameters = count_parameters(student)
    adapters, in_largest_layer = adapter_parameters(student, config.student.lora)
    return adapters / parameters.total, in_largest_layer / parameters.largest_layer, False


def _student_shape(config: Config, teacher: ModelShape) -> ModelShape:
    student = config.student
    if student.from_teacher is not None:
        indices = expected_layers(student.from_teacher.layers, len(teacher.layers))
        return teacher.with_layers(indices, f"{teacher.name}, {len(indices)} of its layers")
    name = student.from_config or student.model
    if not name:
        raise UserError("student.model: missing; name the model to train, or give student.from_teacher.layers")
    return resolve_model(name, "student.from_config" if student.from_config else "student.model")


def _router_loss(config: Config, student: ModelShape) -> bool:
    side = config.student
    name, key = side.from_config or side.model, "student.model"
    if side.from_teacher is not None:
        name, key = config.teacher.model, "teacher.model"
    return balances_experts(student, hub_config(name, key), side.router_aux_weight)


def _efficiency(config: Config) -> Efficiency:
    """What a calibration found, or the closed form as it is."""
    if config.hardware.calibration is None:
        return Efficiency()
    path = Path(config.hardware.calibration).expanduser()
    try:
        fitted = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"hardware.calibration: {path} cannot be read: {error}") from None
    if not isinstance(fitted, dict) or not set(fitted) <= _CALIBRATED:
        raise UserError(f"hardware.calibration: {path} must be a mapping of {', '.join(sorted(_CALIBRATED))}")
    for key, value in fitted.items():
        if key != "run" and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0):
            raise UserError(f"hardware.calibration: {path}: {key}: {value!r} must be a number, at least 0")
    for key in ("teacher_time", "student_time"):
        if fitted.get(key) == 0:
            raise UserError(f"hardware.calibration: {path}: {key}: 0 would take no time; run `plan --calibrate` again")
    optional = {key: fitted[key] for key in ("reserve", "fixed_gib", "jitter") if key in fitted}
    return Efficiency(
        teacher=fitted.get("teacher_time", 1.0),
        student=fitted.get("student_time", 1.0),
        calibrated_from=str(fitted.get("run", path)),
        **optional,
    )


def _writing(config: Config) -> Writing | None:
    """What the student writes, after the longest prompts that may come: lengths of masked ones only the data know."""
    if not student_writes(config):
        return None
    section = config.on_policy
    room = config.data.sequence_length - section.max_new_tokens
    masked = supervised_share(config.hardware.supervised_share, config.data) < 1
    prompt = room if masked else min(section.prompt_tokens, room)
    return Writing(section.fraction, section.max_new_tokens, prompt, section.every, section.lag)


def _supervised(config: Config) -> float:
    """The share of the tokens that is trained on; of written sequences at most what was written."""
    given = supervised_share(config.hardware.supervised_share, config.data)
    if not student_writes(config):
        return given
    section = config.on_policy
    written = section.max_new_tokens / config.data.sequence_length
    return (1 - section.fraction) * given + section.fraction * written


def _packed(config: Config, *models: ModelShape) -> bool:
    """Whether documents share rows, as a run would decide it (see `models.packing.decide_packing`)."""
    if student_writes(config):
        return False
    if config.data.packing != "auto":
        return config.data.packing == "on"
    if unproved_with_packing(config) is not None:
        return False
    return all(
        separates_documents(model.model_type, ["linear_attention"] if is_hybrid(model) else [])[0] for model in models
    )


def _wire_bytes(config: Config, teacher: ModelShape) -> float:
    """Bytes of one element of a payload, with its share of what a row carries besides."""
    return format_of(config.transport.dtype).bytes_per_row(teacher.hidden) / teacher.hidden
