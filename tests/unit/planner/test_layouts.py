"""The plan proposes only layouts that a run takes, and counts for each what a rank really holds."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from disaggkd_cli.config import Config
from disaggkd_cli.errors import UserError
from disaggkd_cli.layouts import facts_of, why_not
from disaggkd_cli.models import backbone_of, decoder_layers
from disaggkd_cli.planner.fit import smallest_remedy
from disaggkd_cli.planner.inputs import workload_of
from disaggkd_cli.planner.memory import teacher_rank
from disaggkd_cli.planner.models import load_preset, preset_names, resolve_model
from disaggkd_cli.planner.models.parameters import count_parameters
from disaggkd_cli.planner.models.tensor_parallel import collective_elements, whole_parameters
from disaggkd_cli.planner.plan import make_plan
from disaggkd_cli.planner.split import splits
from disaggkd_cli.planner.stages import division, fullest_stage, slowest_share
from disaggkd_cli.planner.terms import total

GIB = 2**30


def config_of(teacher: str, **keys) -> Config:
    config = Config()
    config.teacher.model, config.student.model = teacher, "qwen3-0.6b"
    config.student.dtype = "bfloat16"
    config.data.sequence_length, config.train.micro_batch_sequences = 2048, 1
    for key, value in keys.items():
        setattr(config.teacher, key, value)
    return config


@pytest.mark.parametrize("teacher", preset_names())
@pytest.mark.parametrize("parallelism", ["pipeline", "fsdp", "tensor"])
def test_every_layout_that_is_proposed_is_one_that_a_run_takes(teacher, parallelism):
    facts = facts_of(load_preset(teacher)["config"], teacher)
    work = workload_of(config_of(teacher, parallelism=parallelism), gpus=64)
    for gpus in (8, 32):
        for split in splits(work, gpus)[:3]:
            layout = work.with_(
                ranks_per_replica=split.ranks_per_replica, parallelism=getattr(split, "parallelism", work.parallelism)
            ).layout
            assert why_not(layout, facts) is None


@pytest.mark.parametrize("teacher", ["qwen3-235b-a22b", "gpt-oss-120b", "llama-3.2-1b"])
@pytest.mark.parametrize("parallelism", ["pipeline", "fsdp", "tensor"])
def test_changes_that_are_proposed_are_possible(teacher, parallelism):
    work = workload_of(config_of(teacher, parallelism=parallelism))
    for mode in make_plan(work, with_knobs=True).modes.values():
        remedy = smallest_remedy(mode.work, mode.mode) or ""
        for change in [*(knob.change for knob in mode.knobs), *remedy.split()]:
            if change.startswith("teacher.ranks_per_replica="):
                assert work.with_(ranks_per_replica=int(change.partition("=")[2])).refused is None


def test_a_plan_refuses_what_a_run_refuses():
    with pytest.raises(UserError, match="num_key_value_heads=4"):
        workload_of(config_of("qwen3-235b-a22b", parallelism="tensor", ranks_per_replica=8))
    assert workload_of(config_of("qwen3-235b-a22b", parallelism="tensor", ranks_per_replica=4)).refused is None


@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-0.6b", "gemma-3-1b", "deepseek-v3", "qwen3.5-35b-a3b",
                                  "qwen3-30b-a3b", "mixtral-8x7b", "qwen3.5-9b"])  # fmt: skip
def test_what_a_rank_holds_whole_is_what_transformers_leaves_whole(name):
    """Counted over the parameters of the real module, by the plan that transformers gives the model itself."""
    fields = dict(load_preset(name)["config"])
    fields = dict(fields.get("text_config") or fields)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = decoder_layers(model)[0]
    cut = {
        name for name, style in model._tp_plan.items()
        if name.startswith(layers) and style not in ("replicated_with_grad_allreduce", "moe_tp_experts", "replicate")
    }  # fmt: skip
    backbone = {id(one) for one in backbone_of(model).parameters()}
    whole = 0
    for path, parameter in model.named_parameters():
        generic = ".".join("*" if part.isdigit() else part for part in path.split("."))
        if id(parameter) in backbone and generic not in cut and generic.rpartition(".")[0] not in cut:
            whole += parameter.numel()
    assert whole_parameters(resolve_model(name, name)) == whole


def test_latent_attention_stays_whole_on_each_of_sixteen_ranks():
    """11.4 billion parameters of attention are no part of transformers' plan for DeepSeek-V3."""
    work = workload_of(config_of("deepseek-v3", parallelism="tensor", ranks_per_replica=16))
    weights = next(one for one in teacher_rank(work).binding.terms if one.name == "teacher weights")
    assert weights.value / GIB == pytest.approx(99.75, abs=0.05)


def test_two_sums_a_layer():
    shape = resolve_model("llama-3.1-405b", "model")
    assert collective_elements(shape) == 2 * 2 * shape.hidden * len(shape.layers)


@pytest.mark.parametrize("name", preset_names())
def test_stages_hold_each_layer_once(name):
    shape = resolve_model(name, name)
    backbone = count_parameters(shape).backbone
    for stages in (1, 2, 5, 8):
        covered = [layer for start, stop in division(shape, stages) for layer in range(start, stop)]
        assert covered == list(range(len(shape.layers)))
        assert 2 * backbone / stages <= fullest_stage(shape, stages) <= 2 * backbone
        assert 1 / stages <= slowest_share(shape, stages) + 1e-12 and slowest_share(shape, 1) == 1


def test_a_pipeline_gathers_nothing():
    """The fullest of 8 stages of Qwen3-235B holds an eighth; FSDP's rank three whole layers and the embedding more."""
    pipeline = teacher_rank(workload_of(config_of("qwen3-235b-a22b", parallelism="pipeline", ranks_per_replica=8)))
    gathered = teacher_rank(workload_of(config_of("qwen3-235b-a22b", parallelism="fsdp", ranks_per_replica=8)))
    assert "gathered" not in " ".join(one.name for one in pipeline.binding.terms)
    assert gathered.peak_bytes - pipeline.peak_bytes > 12 * GIB
    assert total(pipeline.binding.terms) / GIB == pytest.approx(58, abs=2)


@pytest.mark.parametrize(
    ("teacher", "sequence", "ranks", "packed", "gib"),
    [
        ("gemma-2-27b", 8192, 1, False, 74),
        ("gemma-2-27b", 16384, 1, False, 138),
        ("gpt-oss-20b", 16384, 1, False, 141),
        ("qwen3-32b", 131_072, 2, True, 115),
    ],
)
def test_long_sequences_of_teachers_whose_attention_keeps_scores_or_masks(teacher, sequence, ranks, packed, gib):
    """Against figures measured with transformers' own attention and real tensors."""
    config = config_of(teacher, ranks_per_replica=ranks, parallelism="fsdp")
    config.student.ranks = 8
    config.data.sequence_length, config.data.packing = sequence, "on" if packed else "off"
    assert teacher_rank(workload_of(config)).peak_bytes / GIB == pytest.approx(gib, rel=0.05)
