"""Loading models and heads, and what is said when it does not work."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from disaggkd_cli.config import Config, FromTeacherConfig
from disaggkd_cli.errors import UserError
from disaggkd_cli.models import (
    build_student,
    head_of,
    load_causal_lm,
    load_config,
    load_head,
    load_head_shard,
    model_fingerprint,
    resolve_source,
)
from tests.support.models import FAMILIES, tiny_model


@pytest.fixture
def saved(tmp_path):
    def save(family="llama", name="model", **changes):
        model = tiny_model(family, **changes)
        model.save_pretrained(tmp_path / name)
        return model, tmp_path / name

    return save


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_alone_is_the_models_head(saved, family):
    model, path = saved(family)
    alone = load_head(resolve_source(str(path)), torch.float32, "teacher.model")
    whole = head_of(model)
    assert torch.equal(alone.weight, whole.weight)
    assert (alone.bias is None) == (whole.bias is None)
    assert (alone.scale, alone.softcap) == (whole.scale, whole.softcap)


@pytest.mark.parametrize("cut", [(0, 48), (48, 97), (97, 97)])
@pytest.mark.parametrize("family", ["phi", "gemma2", "gpt2"])
def test_some_rows_of_the_head_alone(saved, family, cut):
    model, path = saved(family)
    part, vocabulary = load_head_shard(resolve_source(str(path)), torch.float32, "teacher.model", lambda size: cut)
    whole = head_of(model).rows(*cut)
    assert vocabulary == 97
    assert torch.equal(part.weight, whole.weight)
    assert part.weight.untyped_storage().nbytes() == 4 * whole.weight.numel()
    assert (part.bias is None) if whole.bias is None else torch.equal(part.bias, whole.bias)
    assert (part.scale, part.softcap) == (whole.scale, whole.softcap)


def test_some_rows_from_files_that_must_be_loaded_whole(saved):
    model, path = saved()
    (path / "model.safetensors").unlink()
    torch.save(model.state_dict(), path / "pytorch_model.bin")
    part, _ = load_head_shard(resolve_source(str(path)), torch.float32, "teacher.model", lambda size: (5, 9))
    assert torch.equal(part.weight, model.lm_head.weight[5:9])
    assert part.weight.untyped_storage().nbytes() == 4 * part.weight.numel()


def test_the_head_of_a_sharded_checkpoint(saved, tmp_path):
    model, _ = saved()
    model.save_pretrained(tmp_path / "sharded", max_shard_size="10KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").exists()
    alone = load_head(resolve_source(str(tmp_path / "sharded")), torch.float32, "teacher.model")
    assert torch.equal(alone.weight, model.lm_head.weight)


def test_a_loaded_model_is_the_saved_one_in_eval_mode(saved):
    model, path = saved()
    loaded = load_causal_lm(resolve_source(str(path)), torch.float32, "teacher.model")
    assert not loaded.training
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    assert load_causal_lm(resolve_source(str(path)), torch.bfloat16, "teacher.model").dtype == torch.bfloat16


def load(path, key="teacher.model"):
    return load_causal_lm(resolve_source(str(path)), torch.float32, key)


def rewrite(path, change):
    """Change the tensors of a saved model in place."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def edit_config(path, **changes):
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))


def test_missing_weights_are_an_error(saved):
    _, path = saved()
    rewrite(path, lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(UserError, match=r"lacks 1 tensors of a llama model: model.layers.2.mlp.up_proj.weight \(48,"):
        load(path)


HALF = {
    "llama": ("num_hidden_layers", "18 tensors of decoder layers", "model.layers.2.input_layernorm.weight (32,)"),
    "gpt2": ("n_layer", "22 tensors of decoder layers", "transformer.h.2."),
    "qwen3_moe": ("num_hidden_layers", "22 tensors of decoder layers", "model.layers.2.input_layernorm.weight (32,)"),
    "mixtral": ("num_hidden_layers", "18 tensors of decoder layers", "model.layers.2."),
    "gemma2": ("num_hidden_layers", "22 tensors of decoder layers", "model.layers.2."),
}


@pytest.mark.parametrize("family", HALF)
def test_half_a_model_is_refused(saved, family):
    key, count, name = HALF[family]
    _, path = saved(family)
    edit_config(path, **{key: 2, "layer_types": None})
    with pytest.raises(UserError) as caught:
        load(path)
    message = str(caught.value)
    assert count in message and name in message and "and " in message
    assert "num_hidden_layers=2, but the files hold layers up to number 3" in message


@pytest.mark.parametrize("key", ["teacher.model", "student.model"])
def test_tensors_of_other_shapes_are_named_with_both(saved, key):
    _, path = saved()
    edit_config(path, intermediate_size=64)
    with pytest.raises(UserError) as caught:
        load(path, key)
    message = str(caught.value)
    assert message.startswith(f"{key}: {path}: 12 tensors have other shapes than its config.json says")
    assert "model.layers.0.mlp.down_proj.weight is (32, 48) in the files and (32, 64) by config.json" in message
    assert "above report" not in message


def test_experts_of_another_number_are_named(saved):
    _, path = saved("qwen3_moe")
    edit_config(path, num_local_experts=2)
    with pytest.raises(UserError, match=r"experts.down_proj is \(4, 32, 16\) in the files and \(2, 32, 16\)"):
        load(path)


def test_an_expert_that_differs_from_the_others_is_named(saved):
    _, path = saved("qwen3_moe")
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    rewrite(path, lambda tensors: tensors.update({name: torch.zeros(20, 32)}))
    with pytest.raises(UserError) as caught:
        load(path)
    odd = f"{name} is (20, 32), others are (16, 32)"
    assert f"cannot be put together to those of the model: {odd};" in str(caught.value)
    assert "above report" not in str(caught.value)


def test_a_config_that_makes_no_model_is_refused(saved):
    _, path = saved()
    edit_config(path, hidden_act="no_such_activation")
    for read in (load, lambda path: load_head(resolve_source(str(path)), torch.float32, "teacher.model")):
        with pytest.raises(UserError, match="teacher.model: .* cannot be loaded: .*no_such_activation"):
            read(path)


def test_a_head_of_another_shape_is_named_when_it_is_read_alone(saved):
    _, path = saved("phi")
    edit_config(path, vocab_size=99)
    with pytest.raises(UserError, match=r"is \(97, 32\) in the files and \(99, 32\) by config.json"):
        load_head(resolve_source(str(path)), torch.float32, "teacher.model")


EXTRA = {
    "a tied head": "lm_head.weight",
    "multi-token prediction": "mtp.layers.0.mlp.up_proj.weight",
    "a vision tower": "model.visual.blocks.3.attn.qkv.weight",
    "another vision tower": "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",
    "rotary buffers": "model.layers.1.self_attn.rotary_emb.inv_freq",
    "rotary tables": "model.layers.1.self_attn.rotary_emb.cos_cached",
}


@pytest.mark.parametrize("kind", EXTRA)
def test_harmless_tensors_may_be_there(saved, kind, caplog):
    model, path = saved("llama", tie_word_embeddings=True)
    rewrite(path, lambda tensors: tensors.update({EXTRA[kind]: torch.zeros(97, 32)}))
    loaded = load(path)
    assert torch.equal(loaded.model.layers[2].mlp.up_proj.weight, model.model.layers[2].mlp.up_proj.weight)
    assert not caplog.records


def test_further_prediction_layers_are_harmless_where_the_config_counts_them(saved):
    _, path = saved()
    rewrite(path, lambda tensors: tensors.update({"model.layers.4.mlp.up_proj.weight": torch.zeros(48, 32)}))
    with pytest.raises(UserError, match="1 tensors of decoder layers"):
        load(path)
    edit_config(path, num_nextn_predict_layers=1)
    load(path)


def test_an_unknown_head_is_a_warning(saved, caplog):
    _, path = saved()
    rewrite(path, lambda tensors: tensors.update({"v_head.summary.weight": torch.zeros(1, 32)}))
    load(path)
    assert "1 tensors of its files are not used by a llama model: v_head.summary.weight (1, 32)" in caplog.text


def test_an_adapter_left_in_a_layer_is_refused(saved):
    _, path = saved()
    name = "model.layers.1.self_attn.q_proj.lora_A.weight"
    rewrite(path, lambda tensors: tensors.update({name: torch.zeros(4, 32)}))
    with pytest.raises(UserError, match=r"q_proj.lora_A.weight \(4, 32\); take the config.json that belongs"):
        load(path)


def test_an_index_that_points_elsewhere_is_refused(saved, tmp_path):
    model, _ = saved()
    model.save_pretrained(tmp_path / "sharded", max_shard_size="10KB")
    index = tmp_path / "sharded" / "model.safetensors.index.json"
    described = json.loads(index.read_text())
    for file in ("../model/model.safetensors", "/etc/passwd", "x/../../model/model.safetensors", "..\\a"):
        described["weight_map"]["lm_head.weight"] = file
        index.write_text(json.dumps(described))
        for read in (load, lambda path: load_head(resolve_source(str(path)), torch.float32, "teacher.model")):
            with pytest.raises(UserError, match="lies outside of its directory"):
                read(tmp_path / "sharded")
    described["weight_map"]["lm_head.weight"] = "not_there.safetensors"
    index.write_text(json.dumps(described))
    with pytest.raises(UserError, match=r"names not_there.safetensors, which is not there"):
        load(tmp_path / "sharded")


def test_damaged_weights_are_an_error(saved):
    _, path = saved()
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="teacher.model"):
        load_causal_lm(resolve_source(str(path)), torch.float32, "teacher.model")
    with pytest.raises(UserError, match="damaged"):
        load_head(resolve_source(str(path)), torch.float32, "teacher.model")


def test_what_is_no_model(tmp_path):
    with pytest.raises(UserError, match="holds no config.json"):
        load_config(resolve_source(str(tmp_path)), "teacher.model")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_family"}))
    with pytest.raises(UserError, match="teacher.model: .* cannot be loaded"):
        load_config(resolve_source(str(tmp_path)), "teacher.model")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="teacher.model"):
        load_config(resolve_source(str(tmp_path)), "teacher.model")


def test_code_in_a_model_directory_is_not_run(saved, tmp_path):
    _, path = saved()
    canary = tmp_path / "canary"
    (path / "evil.py").write_text(f"open({str(canary)!r}, 'w').close()\nclass Evil: pass\n")
    config = json.loads((path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    (path / "config.json").write_text(json.dumps(config))
    load_causal_lm(resolve_source(str(path)), torch.float32, "teacher.model")
    assert not canary.exists()


def test_weights_that_are_a_pickle_are_not_unpickled(saved, tmp_path):
    _, path = saved()
    (path / "model.safetensors").unlink()
    canary = tmp_path / "canary"

    class Evil:
        def __reduce__(self):
            return (open, (str(canary), "w"))

    torch.save({"x": Evil()}, path / "pytorch_model.bin")
    with pytest.raises(UserError, match="teacher.model"):
        load_causal_lm(resolve_source(str(path)), torch.float32, "teacher.model")
    assert not canary.exists()


def student_config(path, **student) -> Config:
    config = Config()
    config.teacher.model = str(path)
    for name, value in student.items():
        setattr(config.student, name, value)
    return config


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("layers", ["every_2", [1, 3]])
def test_a_student_of_the_teachers_layers(saved, family, layers):
    teacher, path = saved(family)
    student = build_student(student_config(path, from_teacher=FromTeacherConfig(layers)))
    kept = [0, 2] if layers == "every_2" else layers
    own, theirs = student.state_dict(), teacher.state_dict()
    prefix = "transformer.h." if family == "gpt2" else "model.layers."
    for position, number in enumerate(kept):
        names = [name for name in theirs if name.startswith(f"{prefix}{number}.")]
        assert names
        for name in names:
            mine = name.replace(f"{prefix}{number}.", f"{prefix}{position}.", 1)
            assert torch.equal(own[mine], theirs[name])
    assert torch.equal(head_of(student).weight, head_of(teacher).weight)
    assert head_of(student).weight.data_ptr() != head_of(teacher).weight.data_ptr()


def test_layers_that_are_not_there(saved):
    _, path = saved()
    with pytest.raises(UserError, match="4 is not there; the teacher has layers 0 to 3"):
        build_student(student_config(path, from_teacher=FromTeacherConfig([0, 4])))


def test_per_layer_settings_follow_the_layers(saved):
    _, path = saved("gemma2")
    student = build_student(student_config(path, from_teacher=FromTeacherConfig([1, 3])))
    assert student.config.layer_types == ["full_attention", "full_attention"]


def test_fresh_weights_follow_the_seed(saved):
    _, path = saved()
    first = build_student(student_config(path, from_config=str(path)))
    again = build_student(student_config(path, from_config=str(path / "config.json")))
    other = student_config(path, from_config=str(path))
    other.seed = 1
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, build_student(other).lm_head.weight)


def test_fingerprints_tell_models_apart(saved, tmp_path):
    _, path = saved()
    shutil.copytree(path, tmp_path / "copy")
    assert model_fingerprint(resolve_source(str(path))) == model_fingerprint(resolve_source(str(tmp_path / "copy")))
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-5] ^= 1
    (tmp_path / "copy" / "model.safetensors").write_bytes(bytes(data))
    assert model_fingerprint(resolve_source(str(path))) != model_fingerprint(resolve_source(str(tmp_path / "copy")))
