"""With flash-linear-attention installed, models are proved on the CPU as they are without it."""

import importlib
import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations import hub_kernels

from disaggkd_cli.config import Config, StudentConfig
from disaggkd_cli.models import backbone_of, head_of, student_from_layers, verify_split
from disaggkd_cli.models.head import hidden_states
from disaggkd_cli.models.load import load_causal_lm, resolve_source
from disaggkd_cli.models.small import small_random_model
from disaggkd_cli.models.student import build_student
from tests.support.models import tiny_model

FAMILIES = ["qwen3_5_text", "qwen3_next", "qwen3_5_moe_text"]


def modelling(family):
    name = family.removesuffix("_text")
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


@pytest.fixture(params=FAMILIES)
def packages(request, monkeypatch, tmp_path):
    """Stand-ins of the packages, bound by transformers' own decorator as at import; like Triton's on CPU tensors they
    raise. Gives the directory of a tiny model, the calls of kernels, and a function that undoes the binding."""
    tiny_model(request.param).save_pretrained(tmp_path)
    calls = []

    def kernel(name):
        def launch(*tensors, **rest):
            calls.append(name)
            raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")

        return launch

    rule = {name: kernel(name) for name in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")}
    convolution = {name: kernel(name) for name in ("causal_conv1d_fn", "causal_conv1d_update")}
    fla, causal_conv1d = ModuleType("fla"), ModuleType("causal_conv1d")
    fla.ops = SimpleNamespace(gated_delta_rule=SimpleNamespace(**rule))
    vars(causal_conv1d).update(convolution)
    monkeypatch.setitem(sys.modules, "fla", fla)
    monkeypatch.setitem(sys.modules, "causal_conv1d", causal_conv1d)
    code = modelling(request.param)
    before = dict(vars(code))
    for name, function in before.items():
        known = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
        if "torch_function" in known:
            bind = hub_kernels.use_kernel_func_from_hub_with_fallback(known["func_name"], known["package"])
            monkeypatch.setattr(code, name, bind(known["torch_function"]))
    yield str(tmp_path), calls, lambda: vars(code).update(before)
    vars(code).update(before)


def test_the_stand_ins_crash_where_nothing_chooses(packages):
    directory, calls, _ = packages
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        verify_split(model, head_of(model), "the teacher")
    assert calls


def test_every_model_is_proved_on_the_cpu(packages):
    directory, calls, _ = packages
    teacher = load_causal_lm(resolve_source(directory), torch.float32, "teacher.model")
    fresh = build_student(Config(student=StudentConfig(model=None, from_config=directory)))
    small = small_random_model(teacher, torch.float32, torch.device("cpu"))
    for model in (teacher, fresh, small, student_from_layers(teacher, [0, 1], torch.float32)):
        verify_split(model, head_of(model), "a model", fresh=model is fresh)
    assert calls == []


def test_values_are_those_without_the_packages(packages):
    directory, _, without = packages
    model = load_causal_lm(resolve_source(directory), torch.float32, "teacher.model")
    ids, positions = torch.arange(3, 14)[None], torch.arange(11)[None]
    states = hidden_states(backbone_of(model), ids, positions)
    without()
    assert torch.equal(states, hidden_states(backbone_of(model), ids, positions))


def test_tensors_of_a_gpu_still_go_to_the_kernels(packages):
    directory, calls, _ = packages
    load_causal_lm(resolve_source(directory), torch.float32, "teacher.model")
    model = AutoModelForCausalLM.from_pretrained(directory)
    chunk = sys.modules[type(model).__module__].torch_chunk_gated_delta_rule

    class OnGpu(torch.Tensor):
        device = torch.device("cuda", 0)

    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        chunk(torch.zeros(1, 4, 2, 8).as_subclass(OnGpu))
    assert calls == ["chunk_gated_delta_rule"]
