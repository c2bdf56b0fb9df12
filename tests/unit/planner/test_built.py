"""Any class that transformers builds can be planned: counted on the meta device, exactly."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from disaggkd_cli.errors import UserError
from disaggkd_cli.planner.inputs import workload_of
from disaggkd_cli.planner.memory import teacher_rank
from disaggkd_cli.planner.models import resolve_model
from disaggkd_cli.planner.models.parameters import count_parameters, layer_parameters
from disaggkd_cli.planner.models.shapes import ExpertMLP, GatedDeltaNet

from .test_layouts import config_of

CLASSES = (
    "gpt2", "gpt_neox", "bloom", "falcon", "opt", "mamba2", "jamba", "nemotron_h", "cohere2", "glm4", "ernie4_5_moe",
    "gemma4_text", "olmoe", "phimoe", "granitemoehybrid", "exaone4", "lfm2", "starcoder2", "minimax",
)  # fmt: skip


@pytest.fixture(params=CLASSES)
def built(request, tmp_path):
    config = CONFIG_MAPPING[request.param]()
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return model, resolve_model(str(tmp_path), "teacher.model"), tmp_path


def test_every_parameter_is_counted(built):
    model, shape, _ = built
    assert count_parameters(shape).total == sum(one.numel() for one in model.parameters())
    assert shape.built and "meta device" in shape.source
    assert all(layer_parameters(layer, shape.hidden) > 0 for layer in shape.layers)


def test_it_can_be_planned(built):
    _, shape, folder = built
    assert teacher_rank(workload_of(config_of(str(folder)))).peak_bytes > 2 * count_parameters(shape).backbone


def test_experts_and_recurrences_are_seen(tmp_path):
    for name, kind in (("olmoe", ExpertMLP), ("mamba2", GatedDeltaNet)):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG_MAPPING[name]().to_dict(), default=str))
        layer = resolve_model(str(tmp_path), "k").layers[0]
        assert isinstance(layer.mlp, kind) or isinstance(layer.mixer, kind)
        if kind is ExpertMLP:
            assert (layer.mlp.experts, layer.mlp.top_k, layer.mlp.width) == (64, 8, 2048) and abs(layer.extra) < 10_000


def test_what_cannot_be_built_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_neox", "hidden_size": 100, "vocab_size": 8,
                                                      "num_hidden_layers": 2, "num_attention_heads": 3}))  # fmt: skip
    with pytest.raises(UserError, match="student.model: .*gpt_neox"):
        resolve_model(str(tmp_path), "student.model")
