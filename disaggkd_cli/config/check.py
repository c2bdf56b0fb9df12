"""What a config must satisfy beyond its types: ranges, words, and keys that depend on each other."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from disaggkd_cli.addresses import is_loopback
from disaggkd_cli.config import layers
from disaggkd_cli.config.attention import problems as attention_problems
from disaggkd_cli.config.by_device import AUTO
from disaggkd_cli.config.check_data import data_paths, data_values
from disaggkd_cli.config.check_on_policy import problems as on_policy_problems
from disaggkd_cli.config.schema import CHOICES, Config
from disaggkd_cli.errors import UserError
from disaggkd_cli.losses.divergences import DIVERGENCES, divergence_named
from disaggkd_cli.model_files import verify_model_directory
from disaggkd_cli.units import parse_bytes

_AT_LEAST_ONE = (
    "teacher.replicas", "teacher.ranks_per_replica", "student.ranks", "student.replicate", "data.sequence_length",
    "train.steps", "train.micro_batch_sequences", "train.accumulation", "train.keep_checkpoints",
    "transport.ring_depth", "transport.links_per_rank", "log.sample_tokens", "on_policy.max_new_tokens",
    "on_policy.samples", "on_policy.every", "on_policy.prompt_tokens", "on_policy.generators.replicas",
)  # fmt: skip
_AT_LEAST_ZERO = (
    "seed", "loss.kd_weight", "loss.ce_weight", "train.learning_rate", "train.warmup_steps",
    "train.weight_decay", "train.clip_norm", "train.eval_every", "train.save_every", "transport.teacher_wait",
    "log.samples", "on_policy.lag", "on_policy.top_k",
)  # fmt: skip
_ABOVE_ZERO = ("loss.temperature", "transport.timeout", "train.save_timeout")
_WHERE_GIVEN = {
    "student.router_aux_weight": 0, "hardware.gpus_per_node": 1, "hardware.nic_gbps": 0, "hardware.gpu_hour_price": 0,
    "hardware.teacher_gpu_hour_price": 0, "loss.hidden_weight": 0,
}  # fmt: skip
"""The least values of keys that may be null, or must be finite."""


def get(config: Config, key: str) -> Any:
    """Return the value of a dotted key."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def check(config: Config, *, running: bool = False) -> list[str]:
    """Return every problem of `config` as `key: reason and mend`, an empty list when it is sound.

    Args:
        config: the typed config.
        running: check also what a run needs and a plan does not: models and data given, local paths that exist.
    """
    problems = [*_words(config), *_ranges(config), *data_values(config.data), *_together(config)]
    if running:
        problems += _for_a_run(config)
    return problems


def is_local_path(source: str) -> bool:
    """Return whether a model source can only be meant as a path, not as a hub name (`organisation/model`)."""
    return source.startswith((".", "/", "~")) or source.count("/") > 1 or source.endswith((".gguf", ".json"))


def missing_path(source: str) -> str | None:
    """Return why a model source cannot be found locally, or None when it exists or may be a hub name."""
    path = Path(source).expanduser()
    if path.exists():
        return None
    first = Path(source).parts[0] if source else ""
    if is_local_path(source) or Path(first).is_dir():
        parent = path.parent
        names = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1)
        hint = f"; did you mean {parent / near[0]}?" if near else ""
        return f"{source} does not exist{hint}"
    if source.count("/") != 1 and not re.fullmatch(r"[\w.-]+", source):
        return f"{source!r} is neither a local path nor a hub name (organisation/model)"
    return None


def _given(config: Config, keys: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield the keys whose section is there, each with its value."""
    for key in keys:
        section = key.partition(".")[0]
        if section == key or getattr(config, section) is not None:
            yield key, get(config, key)


def _words(config: Config) -> Iterator[str]:
    for key, value in _given(config, CHOICES):
        words = CHOICES[key]
        if value is not None and value not in words:  # null only passes where the schema lets it
            near = difflib.get_close_matches(str(value), words, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            yield f"{key}: {value!r} is not known; {hint}there are {', '.join(words)}"


def _ranges(config: Config) -> Iterator[str]:
    for key, value in _given(config, _AT_LEAST_ONE):
        if value < 1:
            yield f"{key}: {value} is too small; it must be at least 1"
    for key, value in _given(config, _AT_LEAST_ZERO):
        if not value >= 0:
            yield f"{key}: {value} is negative; it must be at least 0"
    for key, value in _given(config, _ABOVE_ZERO):
        if not value > 0:
            yield f"{key}: {value} must be above 0"
    for key, value in _given(config, _WHERE_GIVEN):
        least = _WHERE_GIVEN[key]
        if value is not None and not least <= value < float("inf"):
            yield f"{key}: {value} must be a number, at least {least}"
    if not 0 <= config.loss.beta <= 1:
        yield f"loss.beta: {config.loss.beta} is outside 0 … 1"
    elif config.loss.divergence in DIVERGENCES:
        wrong = divergence_named(config.loss.divergence).wrong_beta(config.loss.beta)
        if wrong:
            yield f"loss.{wrong}"
    try:
        if config.loss.memory_budget != AUTO and parse_bytes(config.loss.memory_budget) < 1 << 20:
            yield f"loss.memory_budget: {config.loss.memory_budget} is below 1MiB, too little for one tile of logits"
    except UserError as error:
        yield f"loss.memory_budget: {error}"
    betas = config.train.adam_betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        yield f"train.adam_betas: {betas} must be two numbers in 0 … 1 (1 excluded)"
    threads = config.launch.threads
    if threads != "auto" and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        yield f"launch.threads: {threads!r} must be auto or a number of threads, at least 1"


def _together(config: Config) -> Iterator[str]:
    loss, student, teacher = config.loss, config.student, config.teacher
    if loss.kd_weight == 0 and loss.ce_weight == 0:
        yield "loss.kd_weight: both it and loss.ce_weight are 0, so there is nothing to learn"
    if loss.hidden_loss is not None and loss.hidden_weight == 0:
        yield (
            f"loss.hidden_loss: {loss.hidden_loss} is chosen, but loss.hidden_weight is 0, so it would be computed for "
            "nothing; set loss.hidden_weight above 0, or take loss.hidden_loss out"
        )
    if student.ranks >= 1 and student.replicate >= 1 and student.ranks % student.replicate:
        yield f"student.replicate: {student.replicate} does not divide student.ranks={student.ranks}"
    if loss.vocabulary_parallel not in (True, False, "auto"):
        yield f"loss.vocabulary_parallel: {loss.vocabulary_parallel!r} is not known; there are true, false, auto"
    elif loss.vocabulary_parallel is True and loss.implementation == "full":
        yield (
            "loss.vocabulary_parallel: loss.implementation=full forms whole rows of logits, for which each rank needs "
            "both heads whole; set loss.implementation=fused, or loss.vocabulary_parallel=false"
        )
    starts = [name for name in ("model", "from_teacher", "from_config") if getattr(student, name)]
    if len(starts) > 1:
        yield f"student.{starts[0]}: give only one of student.{', student.'.join(starts)}"
    if student.from_teacher is not None:
        yield from layers.problems(student.from_teacher.layers)
    if student.lora is not None:
        yield from _lora(student)
    yield from attention_problems(config)
    yield from on_policy_problems(config)
    if teacher.parallelism in ("tensor", "pipeline") and config.mode == "colocated":
        yield (
            f"teacher.parallelism: {teacher.parallelism} needs ranks of the teacher's own; colocated teachers are "
            "sharded with fsdp"
        )
    if config.launch.secret == "none" and config.launch.secret_file:
        yield "launch.secret_file: is set, but launch.secret=none leaves it unread; take one of the two out"
    rendezvous = config.launch.rendezvous
    if rendezvous is not None:
        host, _, port = rendezvous.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            yield f"launch.rendezvous: {rendezvous!r} must be host:port, such as node1:29400"
        elif config.launch.bind == "loopback" and not is_loopback(host.strip("[]")):
            yield (
                f"launch.rendezvous: {host} is another interface, but launch.bind=loopback keeps listeners on this "
                "machine; set launch.bind=all or the address to listen on"
            )


def _lora(student: Any) -> Iterator[str]:
    lora, targets = student.lora, student.lora.targets
    if lora.rank < 1:
        yield f"student.lora.rank: {lora.rank} must be at least 1"
    if not lora.alpha > 0:
        yield f"student.lora.alpha: {lora.alpha} must be above 0"
    if not 0 <= lora.dropout < 1:
        yield f"student.lora.dropout: {lora.dropout} must lie between 0 and 1"
    if not isinstance(targets, (str, list)) or not all(isinstance(name, str) for name in targets) or not targets:
        yield f"student.lora.targets: {targets!r} must be all-linear or a list of names, such as [q_proj, v_proj]"
    if student.from_config:
        yield "student.lora: fresh random weights would stay random under adapters; start from student.model instead"


def _model_files(config: Config) -> Iterator[str]:
    """Look at the sizes that local models claim, before anything is built from them."""
    student = config.student
    for key, source, drawn in (
        ("teacher.model", config.teacher.model, False),
        ("student.model", student.model, False),
        ("student.from_config", student.from_config, True),
    ):
        try:
            if source:
                verify_model_directory(source, key, drawn=drawn)
        except UserError as error:
            yield str(error)


def _for_a_run(config: Config) -> Iterator[str]:
    student = config.student
    if not config.teacher.model:
        yield "teacher.model: is required: a model directory, a GGUF file or a hub name"
    elif missing := missing_path(config.teacher.model):
        yield f"teacher.model: {missing}"
    if not (student.model or student.from_teacher or student.from_config):
        yield "student.model: say where the student starts: student.model, student.from_teacher.layers or from_config"
    for name in ("model", "from_config"):
        source = getattr(student, name)
        if source and (missing := missing_path(source)):
            yield f"student.{name}: {missing}"
    yield from _model_files(config)
    yield from data_paths(config.data)
    if config.teacher.cache and config.mode == "colocated":
        yield "teacher.cache: replaces teachers elsewhere; set mode=disaggregated, or remove the key"
    elif config.teacher.cache and not Path(config.teacher.cache).expanduser().is_dir():
        yield f"teacher.cache: {config.teacher.cache} is no directory; `disaggkd teacher CONFIG --record DIR` makes one"
    if config.transport.backend == "nccl" and config.launch.device == "cpu":
        yield "transport.backend: nccl goes between GPUs, and launch.device is cpu; use auto or gloo"
