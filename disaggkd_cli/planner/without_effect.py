"""Keys of a config that change nothing in a plan, and why. Every other key of the schema changes it; a test looks."""

from dataclasses import fields

from disaggkd_cli.config import LogConfig

_ORDER = "which texts, and in what order; a plan counts tokens"
_TIMES_NOT_MODELLED = "evaluation and checkpoint writes are not modelled"
_SAMPLED = "decides what is written, not how much"
_ONE_WRITER = "only the student can write yet"
_OPTIMISATION = "changes values, not sizes"

WITHOUT_EFFECT: dict[str, str] = {
    "seed": _ORDER,
    "run_dir": "where files lie",
    "teacher.trust_remote_code": "decides whether code may run, not what it takes",
    "student.trust_remote_code": "decides whether code may run, not what it takes",
    "student.lora.alpha": _OPTIMISATION,
    "student.lora.dropout": "masks inside adapters are not modelled",
    "loss.beta": _OPTIMISATION,
    "loss.kd_weight": _OPTIMISATION,
    "loss.ce_weight": "cross-entropy is computed for the log in any case",
    "data.eval": _TIMES_NOT_MODELLED,
    "data.eval_sequences": _TIMES_NOT_MODELLED,
    "data.format": _ORDER,
    "data.long_documents": _ORDER,
    "data.records": "which tokens are trained on is measured in the data itself, see hardware.supervised_share",
    "data.columns": _ORDER,
    "data.text_documents": _ORDER,
    "data.chat_template": _ORDER,
    "data.template_arguments": _ORDER,
    "data.length_bucketing": "padding is not modelled: a micro-batch is planned as full",
    "data.cache": "host side",
    "data.workers": "host side",
    "data.streaming": "host side",
    "data.shuffle_tokens": "host side",
    "export.dtype": "what a run leaves on disk is not modelled",
    "export.push_to_hub": "after the run",
    "export.private": "after the run",
    "train.learning_rate": _OPTIMISATION,
    "train.warmup_steps": _OPTIMISATION,
    "train.schedule": _OPTIMISATION,
    "train.weight_decay": _OPTIMISATION,
    "train.clip_norm": "the norm is a number; scaling gradients is part of the optimizer's pass",
    "train.adam_betas": _OPTIMISATION,
    "train.eval_every": _TIMES_NOT_MODELLED,
    "train.save_every": _TIMES_NOT_MODELLED,
    "train.keep_checkpoints": "on disk",
    "train.save_timeout": "after a fault",
    "train.on_save_error": "after a fault",
    "train.stop_at": "a plan is of one step",
    "transport.timeout": "after a fault",
    "transport.teacher_wait": "after a fault",
    "transport.checksum": "host side, gloo only",
    "transport.mixed_teachers": "which teachers may serve, not what they take",
    "launch.rendezvous": "an address",
    "launch.threads": "host side",
    "launch.bind": "an address",
    "launch.secret": "host side",
    "launch.secret_file": "a file",
    **{f"on_policy.{name}": _SAMPLED for name in ("temperature", "top_p", "top_k", "samples")},
    **{f"on_policy.{name}": _ONE_WRITER for name in ("writers", "generators.replicas", "generators.dtype")},
    **{f"log.{field.name}": "where figures go" for field in fields(LogConfig)},
}
"""Dotted key -> why it changes nothing."""
