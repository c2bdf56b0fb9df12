"""Every key of the schema changes the plan, or is listed as without effect, with the reason."""

import dataclasses
import json
import typing

import pytest

from disaggkd_cli.config import load
from disaggkd_cli.config.schema import Config
from disaggkd_cli.errors import UserError
from disaggkd_cli.planner.fit import roles_of
from disaggkd_cli.planner.inputs import workload_of
from disaggkd_cli.planner.plan import as_json, make_plan
from disaggkd_cli.planner.without_effect import WITHOUT_EFFECT

BASE = """
teacher: {model: qwen3-8b, replicas: 2}
student: {model: qwen3-1.7b, ranks: 8, dtype: bfloat16}
data: {train: data.jsonl, sequence_length: 2048}
train: {micro_batch_sequences: 2, accumulation: 2}
"""
LORA = "student.lora.targets=all-linear"
CHANGES = {
    "mode": "colocated",
    "teacher.model": "qwen3-14b",
    "teacher.dtype": "float32",
    "teacher.replicas": "1",
    "teacher.ranks_per_replica": "2",
    "teacher.parallelism": ("teacher.parallelism=tensor", "teacher.ranks_per_replica=2"),
    "teacher.cache": "recorded",
    "teacher.attention": "eager",
    "student.model": "qwen3-4b",
    "student.from_teacher.layers": ("student.model=null", "student.from_teacher.layers=every_2"),
    "student.from_config": ("student.model=null", "student.from_config=qwen3-4b"),
    "student.lora.rank": (LORA, "student.lora.rank=64"),
    "student.lora.targets": "all-linear",
    "student.ranks": "4",
    "student.dtype": "float32",
    "student.freeze": "['*embed*']",
    "student.activation_checkpointing": "full",
    "student.replicate": "2",
    "student.compile": "true",
    "student.router_aux_weight": ("student.model=qwen3-30b-a3b", "student.router_aux_weight=0"),
    "student.attention": "eager",
    "loss.divergence": "jsd",
    "loss.temperature": ("loss.implementation=full", "loss.temperature=2"),
    "loss.hidden_weight": "0.5",
    "loss.hidden_loss": ("loss.hidden_weight=0.5", "loss.hidden_loss=mse"),
    "loss.implementation": "full",
    "loss.memory_budget": "64MiB",
    "loss.vocabulary_parallel": "true",
    "data.train": "masked.jsonl",
    "data.sequence_length": "1024",
    "data.packing": "off",
    "train.micro_batch_sequences": "1",
    "train.accumulation": "1",
    "train.steps": "50",
    "transport.ring_depth": "2",
    "transport.dtype": "float8",
    "transport.backend": "gloo",
    "transport.links_per_rank": ("teacher.replicas=16", "transport.links_per_rank=8"),
    "launch.device": "cpu",
    "on_policy.fraction": "0.5",
    "on_policy.max_new_tokens": ("on_policy.fraction=0.5", "on_policy.max_new_tokens=64"),
    "on_policy.every": ("on_policy.fraction=0.5", "on_policy.every=4"),
    "on_policy.lag": ("on_policy.fraction=0.5", "on_policy.lag=0"),
    "on_policy.prompt_tokens": ("on_policy.fraction=0.5", "on_policy.prompt_tokens=64"),
    "hardware.gpu": "A100-80-SXM",
    "hardware.gpus_per_node": "4",
    "hardware.nic_gbps": "25",
    "hardware.teacher_gpu": "H200-SXM",
    "hardware.supervised_share": "0.5",
    "hardware.catalogue": "catalogue.yaml",
    "hardware.calibration": "calibration.yaml",
    "hardware.gpu_hour_price": "7",
    "hardware.teacher_gpu_hour_price": "3",
}
"""A value of each key, or the overrides that show its effect (the last against all but it)."""


def keys_of(cls, prefix=""):
    hints = typing.get_type_hints(cls)
    for one in dataclasses.fields(cls):
        inner = [
            kind for kind in (hints[one.name], *typing.get_args(hints[one.name])) if dataclasses.is_dataclass(kind)
        ]
        yield from keys_of(inner[0], f"{prefix}{one.name}.") if inner else [prefix + one.name]


KEYS = list(keys_of(Config))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(BASE)
    (tmp_path / "masked.jsonl").write_text(json.dumps({"prompt": "p" * 30, "completion": "c" * 10}) + "\n")
    (tmp_path / "catalogue.yaml").write_text(
        "gpus: {H100-SXM: {memory_gib: 60, bf16_tflops: 989, matmul_tflops: 700, hbm_tb_per_s: 3.35, "
        "nvlink_gb_per_s: 450, pcie_gb_per_s: 64}}\n"
    )
    (tmp_path / "calibration.yaml").write_text("teacher_time: 1.5\nstudent_time: 1.2\n")
    return tmp_path


def plan_of(overrides):
    plan = as_json(make_plan(workload_of(load("config.yaml", overrides)), with_knobs=False))
    return json.dumps(plan, sort_keys=True, default=str)


def test_every_key_is_known_here():
    assert set(KEYS) == set(CHANGES) | set(WITHOUT_EFFECT), "a new key changes the plan, or says why it does not"
    assert not set(CHANGES) & set(WITHOUT_EFFECT)
    assert all(WITHOUT_EFFECT.values())


@pytest.mark.parametrize("key", CHANGES)
def test_it_changes_the_plan(key, folder):
    change = CHANGES[key]
    overrides = list(change) if isinstance(change, tuple) else [f"{key}={change}"]
    before = overrides[:-1] if isinstance(change, tuple) else []
    if key == "mode":
        # A plan shows all modes in any case; which teachers' layouts there are depends on it.
        with pytest.raises(UserError):
            plan_of(["teacher.parallelism=tensor", "teacher.ranks_per_replica=3"])
        return
    if key.startswith(("student.from_", "student.lora.targets")):
        before = []
    assert plan_of(overrides) != plan_of(before)


def test_full_logits_of_a_student_apart(folder):
    """4,096 rows of 151,936 ids: 29 bytes each, and two more for gradients in bfloat16."""
    work = workload_of(load("config.yaml", ["loss.implementation=full"]))
    terms = {one.name: one.value for one in roles_of(work, "disaggregated_fused")["student"].phases[0].terms}
    assert terms["full logits"] == 31 * 4096 * 151_936


@pytest.mark.parametrize(
    ("records", "share"),
    [
        ([{"prompt": "p" * 30, "completion": "c" * 10}], 0.25),
        ([{"messages": [{"role": "user", "content": "u" * 10}, {"role": "assistant", "content": "a" * 30}]}], 0.75),
        ([{"conversations": [{"from": "human", "value": "u" * 10}, {"from": "gpt", "value": "a" * 10}]}], 0.5),
        ([{"instruction": "i" * 6, "input": "", "output": "o" * 2}], 0.25),
        ([{"text": "all of it"}], 1.0),
        ([], 1.0),
    ],
)
def test_the_share_that_is_trained_on_is_seen_in_the_data(folder, records, share):
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert workload_of(load("config.yaml")).supervised == share


@pytest.mark.parametrize("wrong", ["0", "1.5", "much", "true"])
def test_a_share_is_a_share(folder, wrong):
    with pytest.raises(UserError, match="hardware.supervised_share"):
        workload_of(load("config.yaml", [f"hardware.supervised_share={wrong}"]))
