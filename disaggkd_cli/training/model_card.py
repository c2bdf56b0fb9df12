"""The README of an exported student, written from what the run has on record."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from disaggkd_cli import __version__
from disaggkd_cli.config import Config
from disaggkd_cli.units import printable

_MEASURES = (
    ("eval_perplexity", "perplexity", "{:,.1f}"),
    ("eval_lm_loss", "LM loss (nats a token)", "{:.4f}"),
    ("eval_kd", "divergence from the teacher", "{:.4f}"),
    ("eval_top1_agreement", "same best token as the teacher", "{:.1%}"),
)
_LICENCE = re.compile(r"^license:\s*([\w.+-]+)\s*$", re.MULTILINE)


def model_card(
    config: Config, layers: Sequence[int] | str | None, metrics: Sequence[Mapping[str, Any]], step: int, versions: str
) -> str:
    """Return the card as Markdown with the hub's front matter.

    Args:
        config: of the run.
        layers: the teacher's layers that the student began with, as numbers or in the config's words.
        metrics: the run's lines; evaluations among them make the tables.
        step: optimizer steps that the exported weights have taken.
        versions: one line of what trained it.
    """
    teacher = _public(config.teacher.model)
    front: dict[str, Any] = {"library_name": "transformers", "tags": ["distillation", "disaggkd"]}
    if config.teacher.model == teacher:  # a name of the hub, not somebody's path
        front["base_model"] = [teacher]
    licence = licence_of(config.teacher.model)
    if licence:
        front["license"] = licence
    recorded = _config_text(config)
    fence = "```" + "`" * max(map(len, re.findall("`+", recorded)), default=0)
    parts = [
        "---",
        yaml.safe_dump(front, sort_keys=False).strip(),
        "---",
        "",
        f"# {_literal(Path(config.run_dir).name)}",
        "",
        f"Distilled from **{_literal(teacher)}** with [disaggkd](https://pypi.org/project/disaggkd/) {__version__}.",
        "",
        _start(config, layers, teacher),
        _licence_line(teacher, licence),
        "",
        *_evaluations([line for line in metrics if "eval_kd" in line and line["step"] <= step]),
        *_training(config, metrics, step),
        "",
        "## How to use it",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained("THIS_DIRECTORY")',
        'tokenizer = AutoTokenizer.from_pretrained("THIS_DIRECTORY")',
        "```",
        "",
        "## How it was made",
        "",
        f"`disaggkd run run.yaml`, with {versions} and this config (paths are shortened to their last part):",
        "",
        f"{fence}yaml",
        recorded,
        fence,
        "",
    ]
    return "\n".join(parts)


def licence_of(model: str) -> str | None:
    """Return the licence that a model directory's own card names, or None where there is none to be found."""
    try:
        found = _LICENCE.search(Path(model).expanduser().joinpath("README.md").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
    return found.group(1) if found else None


def _start(config: Config, layers: Sequence[int] | str | None, teacher: str) -> str:
    student = config.student
    if student.from_teacher is not None:
        which = f"`{layers}`" if isinstance(layers, str) else list(layers or [])
        return f"It began as layers {which} of {_literal(teacher)}, with its embeddings and its head."
    if student.from_config:
        return f"It began with fresh weights of the configuration {_literal(_public(student.from_config))}."
    return f"It began as {_literal(_public(student.model or ''))}."


def _licence_line(teacher: str, licence: str | None) -> str:
    if licence:
        return f"{_literal(teacher)} names its licence as `{licence}`; whoever publishes this model must follow it."
    return f"No licence of {_literal(teacher)} was found beside its weights: look it up before you publish this model."


def _evaluations(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    if not lines:
        return []
    table = [
        "## On held-out text",
        "",
        f"| after step | {' | '.join(title for _, title, _ in _MEASURES)} |",
        "|---:|" + "---:|" * len(_MEASURES),
    ]
    for line in lines:
        cells = (form.format(line[key]) if key in line else "" for key, _, form in _MEASURES)
        table.append(f"| {line['step']:,} | {' | '.join(cells)} |")
    teacher = lines[-1].get("eval_teacher_lm_loss")
    return [*table, "", *([f"The teacher's own LM loss on it is {teacher:.4f}.", ""] if teacher else [])]


def _training(config: Config, metrics: Sequence[Mapping[str, Any]], step: int) -> list[str]:
    trained = [line for line in metrics if "loss" in line and line["step"] <= step]
    tokens = sum(int(line.get("supervised_tokens", 0)) for line in trained)
    loss = config.loss
    mixed = f" + {loss.ce_weight:g} · cross-entropy" if loss.ce_weight else ""
    return [
        "## Training",
        "",
        f"{step:,} steps of {config.global_batch_sequences} sequences of at most {config.data.sequence_length} tokens, "
        f"{tokens:,} supervised tokens in all. Loss: {loss.kd_weight:g} · {loss.divergence} at temperature "
        f"{loss.temperature:g}{mixed}, over the whole vocabulary. AdamW, learning rate {config.train.learning_rate:g}, "
        f"{config.train.schedule} schedule, {config.train.warmup_steps} warm-up steps.",
    ]


def _config_text(config: Config) -> str:
    return yaml.safe_dump(_shortened(dataclasses.asdict(config)), sort_keys=False, allow_unicode=True).strip()


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shortened(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_shortened(entry) for entry in value]
    return _public(value) if isinstance(value, str) else value


def _public(name: str) -> str:
    """Return a path's last part, and a name of the hub (owner/name, not a path here) as it is."""
    if name.startswith(("/", "~", ".")) or name.count("/") > 1 or ("/" in name and Path(name).exists()):
        return Path(name).name
    return name


def _literal(text: str) -> str:
    """Return `text` so that Markdown shows it as it is, on one line."""
    return re.sub(r"([\\`*\[\]<>|#])", r"\\\1", printable(" ".join(text.split())))
