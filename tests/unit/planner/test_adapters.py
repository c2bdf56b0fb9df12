"""Adapters counted in closed form against peft's own, and what they change in a plan."""

import pytest

from disaggkd_cli.config import Config
from disaggkd_cli.config.models import LoraConfig
from disaggkd_cli.errors import UserError
from disaggkd_cli.models.lora import add_adapters
from disaggkd_cli.planner import memory
from disaggkd_cli.planner.inputs import workload_of
from disaggkd_cli.planner.models import resolve_model
from disaggkd_cli.planner.models.trained import adapter_parameters
from tests.support.models import tiny_model

KINDS = [
    "llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "gemma3_text", "qwen3_5_text",
    "qwen3_5_moe_text",
]  # fmt: skip


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj", "in_proj_z"]], ids=["all", "some"])
@pytest.mark.parametrize("kind", KINDS)
def test_as_many_as_peft_makes(kind, targets, tmp_path):
    model = tiny_model(kind)
    model.config.save_pretrained(tmp_path)
    shape = resolve_model(str(tmp_path), "student.model")
    lora = LoraConfig(rank=3, targets=targets)
    if kind in ("qwen3_moe", "deepseek_v3") and targets != "all-linear":
        with pytest.raises(UserError, match="reaches .*experts, where the matrices of all experts lie in one tensor"):
            add_adapters(model, lora, seed=0)
        return
    add_adapters(model, lora, seed=0)
    adapters = sum(parameter.numel() for name, parameter in model.named_parameters() if "lora_" in name)
    assert adapter_parameters(shape, lora)[0] == adapters > 0


def test_names_that_no_matrix_has():
    with pytest.raises(UserError, match="student.lora.targets.*q_proj"):
        adapter_parameters(resolve_model("qwen3-8b", "student.model"), LoraConfig(targets=["q_prog"]))


def test_a_frozen_base_has_neither_moments_nor_gradients():
    config = Config()
    config.teacher.model, config.student.model, config.student.ranks = "qwen3-32b", "qwen3-8b", 2
    whole = memory.student_rank(workload_of(config))
    config.student.lora = LoraConfig(rank=16)
    adapted = memory.student_rank(workload_of(config))
    shape = resolve_model("qwen3-8b", "student.model")
    adapters, _ = adapter_parameters(shape, config.student.lora)

    def optimizer(rank):
        return {term.name: term.value for term in rank.phases[-1].terms}

    assert optimizer(adapted)["Adam moments"] == pytest.approx(8 * adapters / 2)
    assert optimizer(adapted)["master weights"] == optimizer(whole)["master weights"]
    names = {term.name for phase in adapted.phases for term in phase.terms if term.value}
    assert not names & {"dW of the head", "head gradient, whole", "embedding and head gradients", "root reduction"}
    assert adapted.peak_bytes < 0.7 * whole.peak_bytes
