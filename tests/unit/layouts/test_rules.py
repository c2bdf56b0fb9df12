"""One owner of which layouts there are: what it says is what the installed transformers and its models would do."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from disaggkd_cli.errors import UserError
from disaggkd_cli.layouts import PARALLELISMS, Layout, choose, facts_of, require, tensor_plan, why_not
from disaggkd_cli.layouts.tensor_plans import FILE
from disaggkd_cli.models import decoder_layers
from disaggkd_cli.planner.models import load_preset, preset_names
from scripts.tensor_plans import layers_share_parameters, read_plans


def preset_facts(name):
    return facts_of(load_preset(name)["config"], name)


def test_the_file_is_what_the_installed_transformers_gives():
    stored = json.loads(FILE.read_text())
    plans = {model_type: entry["layer"] for entry in stored["plans"] for model_type in entry["model_types"]}
    assert plans == read_plans(), "python scripts/tensor_plans.py writes it anew"
    assert [
        name for name in ("zamba", "zamba2", "prophetnet", "llama", "mixtral") if layers_share_parameters(name)
    ] == [name for name in ("zamba", "zamba2", "prophetnet") if name in stored["layers_share_parameters"]]


@pytest.mark.parametrize("name", ["llama-3.2-1b", "gpt-oss-20b", "deepseek-v3", "qwen3.5-35b-a3b", "gemma-2-2b"])
def test_the_plan_of_a_layer_is_the_one_that_transformers_gives_a_model(name):
    fields = dict(load_preset(name)["config"])
    fields = dict(fields.get("text_config") or fields)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    start = f"{decoder_layers(model)[0]}.*."
    assert tensor_plan(config.model_type) == {
        key.removeprefix(start): style for key, style in model._tp_plan.items() if key.startswith(start)
    }


@pytest.mark.parametrize(
    ("name", "layout", "refused"),
    [
        ("qwen3-235b-a22b", Layout("tensor", 8), "num_key_value_heads=4"),
        ("qwen3-235b-a22b", Layout("tensor", 4), None),
        ("qwen3.5-397b-a17b", Layout("tensor", 8), "num_key_value_heads=2"),
        ("gpt-oss-120b", Layout("tensor", 4), "no tensor-parallel plan for the layers of gpt_oss"),
        ("qwen3-32b", Layout("tensor", 3), "num_attention_heads=64"),
        ("qwen3-32b", Layout("tensor", 8), None),
        ("qwen3-30b-a3b", Layout("tensor", 4), None),
        ("deepseek-v3", Layout("tensor", 16), None),
        ("llama-3.1-405b", Layout("tensor", 16), "num_key_value_heads=8"),
        ("llama-3.1-405b", Layout("tensor", 1), None),
        ("llama-3.1-405b", Layout("pipeline", 16), None),
        ("llama-3.2-1b", Layout("pipeline", 17), "16 layers"),
        ("gpt-oss-120b", Layout("fsdp", 3), None),
        ("qwen3.5-397b-a17b", Layout("pipeline", 7), None),
    ],
    ids=str,
)
def test_known_layouts(name, layout, refused):
    problem = why_not(layout, preset_facts(name))
    assert problem is None if refused is None else refused in problem
    if refused:
        with pytest.raises(UserError, match=r"^teacher\.(parallelism|ranks_per_replica): .*; use"):
            require(layout, preset_facts(name))


def test_heads_need_not_divide_where_the_plan_leaves_them_whole():
    """phi3 gathers its fused projections again, so any number of ranks will do."""
    assert why_not(Layout("tensor", 7), facts_of({"model_type": "phi3", "num_attention_heads": 32}, "phi")) is None
    assert "=32" in why_not(Layout("tensor", 7), facts_of({"model_type": "llama", "num_attention_heads": 32}, "llama"))


def test_experts_are_cut_by_their_width():
    fields = {"model_type": "mixtral", "num_local_experts": 8, "intermediate_size": 100, "num_attention_heads": 8}
    assert "experts of width 100" in why_not(Layout("tensor", 8), facts_of(fields, "m"))
    assert why_not(Layout("tensor", 4), facts_of(fields, "m")) is None


def test_what_files_and_classes_forbid():
    llama = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8}
    gguf = facts_of(llama, "model.gguf", gguf=True)
    assert [bool(why_not(Layout(kind, 2), gguf)) for kind in ("pipeline", "fsdp", "tensor")] == [True, False, True]
    quantised = facts_of(llama, "awq", quantization="awq")
    assert [bool(why_not(Layout(kind, 2), quantised)) for kind in ("pipeline", "fsdp", "tensor")] == [False, True, True]
    zamba = facts_of({"model_type": "zamba2", "num_hidden_layers": 4}, "zamba")
    assert [bool(why_not(Layout(kind, 2), zamba)) for kind in ("pipeline", "fsdp")] == [True, True]
    assert why_not(Layout("fsdp", 1), zamba) is None


@pytest.mark.parametrize("name", preset_names())
def test_what_is_chosen_is_allowed(name):
    facts = preset_facts(name)
    for ranks in (1, 2, 3, 8):
        layout, reason = choose(ranks, facts)
        assert why_not(layout, facts) is None and reason
        assert layout.kind == ("one rank" if ranks == 1 else "pipeline")
    assert all(why_not(Layout(kind, 1), facts) is None for kind in PARALLELISMS)
