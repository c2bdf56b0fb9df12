"""Where the student starts: a model, some of the teacher's layers, or fresh weights."""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from disaggkd_cli.config import Config
from disaggkd_cli.errors import UserError
from disaggkd_cli.models.fill import fill
from disaggkd_cli.models.hollow import ReadWhole, hollow_student
from disaggkd_cli.models.kernels import choose_kernels_by_device
from disaggkd_cli.models.layers import student_from_layers
from disaggkd_cli.models.load import load_causal_lm, load_config, resolve_source, teacher_source
from disaggkd_cli.models.lora import add_adapters


def build_student(config: Config) -> nn.Module:
    """Return the student as the config describes it, in float32 (its master weights), on the CPU, in eval mode.

    Fresh weights, also of adapters, are drawn from `config.seed`, so that every rank builds the same ones.

    Raises:
        UserError: when a model cannot be read, the teacher has no such layers, or adapters cannot be put in.
    """
    if config.student.from_teacher is not None:
        with contextlib.suppress(ReadWhole):
            hollow = hollow_student(config)  # so that the teacher is never whole in memory
            fill(hollow.model, hollow.parts, torch.device("cpu"))
            return hollow.model
    model = _starting_weights(config)
    if config.student.lora is not None:
        add_adapters(model, config.student.lora, config.seed)
    return model.eval()


def _starting_weights(config: Config) -> nn.Module:
    student = config.student
    if student.from_teacher is not None:
        source = teacher_source(config)
        teacher = load_causal_lm(source, torch.float32, "teacher.model")
        return student_from_layers(teacher, student.from_teacher.layers, torch.float32).eval()
    if student.from_config:
        source = resolve_source(student.from_config, trust_remote_code=student.trust_remote_code)
        model_config = load_config(source, "student.from_config")
        torch.manual_seed(config.seed)
        try:
            model = AutoModelForCausalLM.from_config(
                model_config, dtype=torch.float32, trust_remote_code=student.trust_remote_code
            )
        except Exception as error:  # whatever a model's class says of a configuration that makes no model
            told = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(f"student.from_config: {source.name} makes no model ({told[:300]})") from None
        return choose_kernels_by_device(model.eval())
    source = resolve_source(student.model, trust_remote_code=student.trust_remote_code)
    return load_causal_lm(source, torch.float32, "student.model")
