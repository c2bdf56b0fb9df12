"""Where shapes and hardware come from, and what is refused."""

from __future__ import annotations

import json

import pytest

from disaggkd_cli.config import Config
from disaggkd_cli.config.schema import HardwareConfig
from disaggkd_cli.errors import UserError
from disaggkd_cli.planner.cluster import cluster_of
from disaggkd_cli.planner.hardware import load_catalogue
from disaggkd_cli.planner.models import load_preset, preset_names, resolve_model
from disaggkd_cli.planner.models.families import model_shape
from disaggkd_cli.planner.models.shapes import ExpertMLP, GatedDeltaNet, GroupedQueryAttention


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def test_every_preset_names_its_source_and_hub_names():
    assert len(preset_names()) >= 34
    for name in preset_names():
        entry = load_preset(name)
        assert entry["source"] and entry["hub_names"]


def test_hub_names_and_preset_names_give_the_same_shape():
    by_hub, by_preset = resolve_model("Qwen/Qwen3.5-35B-A3B", "k"), resolve_model("qwen3.5-35b-a3b", "k")
    assert by_hub == by_preset
    assert "preset" in by_hub.source


def test_a_local_file_wins_over_presets(tmp_path):
    config = dict(load_preset("qwen3-0.6b")["config"], num_hidden_layers=3)
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "config.json"):
        assert len(resolve_model(str(path), "k").layers) == 3


def test_a_hub_cache_entry_is_read(tmp_path):
    folder = tmp_path / "hub" / "models--Qwen--Qwen3-0.6B" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(load_preset("qwen3-0.6b")["config"], num_hidden_layers=5)))
    assert len(resolve_model("Qwen/Qwen3-0.6B", "k").layers) == 5


def test_an_unknown_model_gets_suggestions():
    with pytest.raises(UserError, match=r"student.model: .*did you mean .*Qwen3-8B"):
        resolve_model("Qwen/Qwen3-8", "student.model")


def test_an_unknown_architecture_is_refused_with_what_is_missing():
    with pytest.raises(
        UserError, match=r"model_type 'rwkv9' is not an architecture.*lacks .*num_attention_heads.*does not guess"
    ):
        model_shape({"model_type": "rwkv9", "hidden_size": 4, "vocab_size": 8, "num_hidden_layers": 1}, "x", "x")


def test_missing_fields_are_all_named():
    config = dict(load_preset("qwen3-30b-a3b")["config"])
    del config["num_experts"], config["head_dim"]
    with pytest.raises(UserError, match="must give head_dim, num_experts"):
        model_shape(config, "x", "x")


def test_nested_text_config_and_its_tie_at_the_top():
    inner = dict(load_preset("qwen3.5-9b")["config"])
    inner.pop("tie_word_embeddings")
    shape = model_shape({"model_type": "qwen3_5", "text_config": inner, "tie_word_embeddings": True}, "x", "x")
    assert shape.tied
    kinds = [type(layer.mixer) for layer in shape.layers[:4]]
    assert kinds == [GatedDeltaNet] * 3 + [GroupedQueryAttention]


def test_sparse_step_and_dense_layers_are_honoured():
    config = dict(load_preset("qwen3-30b-a3b")["config"], decoder_sparse_step=2, mlp_only_layers=[1])
    layers = model_shape(config, "x", "x").layers
    assert [isinstance(layer.mlp, ExpertMLP) for layer in layers[:6]] == [False, False, False, True, False, True]


def test_from_teacher_layers_must_exist():
    shape = resolve_model("smollm2-135m", "k")
    assert len(shape.with_layers([0, 2, 29], "cut").layers) == 3
    with pytest.raises(UserError, match=r"layers \[30\], but smollm2-135m has layers 0 to 29"):
        shape.with_layers([0, 30], "cut")


def test_unknown_gpu_and_node_get_suggestions():
    catalogue = load_catalogue()
    with pytest.raises(UserError, match="hardware.gpu: 'H100' is no known GPU; did you mean H100-"):
        catalogue.gpu("H100", "hardware.gpu")
    with pytest.raises(UserError, match="did you mean aws/p5.48xlarge"):
        catalogue.node("aws/p5.48large")


def test_users_file_adds_and_overrides(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "gpus:\n  X1: {memory_gib: 48, bf16_tflops: 100, matmul_tflops: 80, hbm_tb_per_s: 1}\nnodes:\n  lab: "
        "{gpu: X1, gpus_per_node: 2, nic_gbps: 10}\n"
    )
    catalogue = load_catalogue(str(path))
    assert catalogue.gpu("X1", "k").memory_bytes == 48 * 2**30
    assert catalogue.node("lab").gpus_per_node == 2
    assert "H100-SXM" in catalogue.gpus


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            "{memory_gib: 48, bf16_tflops: 100, matmul_tflops: 80, hbm_tb_per_s: -1}",
            "hbm_tb_per_s: -1 must be a number above 0",
        ),
        (
            "{memory_gib: 48, bf16_tflops: 100, matmul_tflops: 180, hbm_tb_per_s: 1}",
            "matmul_tflops 180 is above its peak",
        ),
        ("{memory_gib: 48, bf16_tflops: 100, hbm_tb_per_s: 1}", "lacks matmul_tflops"),
        ("{memory: 48}", "'memory' is no known field; did you mean memory_gib"),
        ("{memory_gib: .nan, bf16_tflops: 1, matmul_tflops: 1, hbm_tb_per_s: 1}", "must be a number above 0"),
    ],
)
def test_nonsense_hardware_is_refused(tmp_path, entry, message):
    path = tmp_path / "bad.yaml"
    path.write_text(f"gpus:\n  X: {entry}\n")
    with pytest.raises(UserError, match=message):
        load_catalogue(str(path))


def test_memory_is_what_the_driver_reports():
    gpus = load_catalogue().gpus
    mebibytes = {"B200-SXM": 183_359, "GB200": 189_471, "RTX5090": 32_607, "A6000": 49_140, "GH200-96": 97_871}
    for name, total in {**mebibytes, "RTX-PRO-6000": 97_887, "L40S": 46_068}.items():
        assert gpus[name].memory_gib == pytest.approx(total / 1024, abs=0.02), name


def test_shipped_prices_have_a_date_and_none_is_invented():
    assert all(gpu.price_per_hour is None or gpu.price_date for gpu in load_catalogue().gpus.values())


def test_a_price_needs_its_date(tmp_path):
    path = tmp_path / "mine.yaml"
    entry = "memory_gib: 48, bf16_tflops: 100, matmul_tflops: 80, hbm_tb_per_s: 1, price_per_hour: 2"
    path.write_text(f"gpus:\n  X: {{{entry}}}\n")
    with pytest.raises(UserError, match="X.price_per_hour: a price needs its price_date"):
        load_catalogue(str(path))
    path.write_text(f"gpus:\n  X: {{{entry}, price_date: 2026-01-31}}\n")
    assert load_catalogue(str(path)).gpus["X"].price_date == "2026-01-31"


@pytest.mark.parametrize(("gpu", "nodes_of", "gbps"), [("RTX4090", 4, 2.5), ("H100-SXM", 8, 400), ("GH200-96", 1, 200)])
def test_the_machine_follows_the_gpu(gpu, nodes_of, gbps):
    cluster = cluster_of(Config(hardware=HardwareConfig(gpu=gpu)))
    assert (cluster.gpus_per_node, cluster.nic_gb_per_s) == (nodes_of, gbps / 8)
    own = cluster_of(Config(hardware=HardwareConfig(gpu=gpu, gpus_per_node=2, nic_gbps=100)))
    assert (own.gpus_per_node, own.nic_gb_per_s) == (2, 12.5)
