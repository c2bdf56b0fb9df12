"""Teachers in GGUF files are planned as a run holds them: the header's shape, every weight in `teacher.dtype`."""

import gguf
import numpy as np
import pytest

from disaggkd_cli.config import load
from disaggkd_cli.errors import UserError
from disaggkd_cli.planner.inputs import workload_of
from disaggkd_cli.planner.memory import teacher_rank
from disaggkd_cli.planner.models import resolve_model
from disaggkd_cli.planner.models.parameters import count_parameters

HIDDEN, WIDTH, LAYERS, VOCABULARY = 64, 96, 3, 160


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def file(request, tmp_path):
    """A llama of random weights, its matrices in Q8_0; and the number of its weights."""
    path = tmp_path / "teacher.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("toy")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(16)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(VOCABULARY)
    sizes = {"token_embd.weight": (VOCABULARY, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        sizes |= {
            f"blk.{layer}.{name}.weight": size
            for name, size in {
                "attn_norm": (HIDDEN,),
                "ffn_norm": (HIDDEN,),
                "attn_q": (64, HIDDEN),
                "attn_k": (32, HIDDEN),
                "attn_v": (32, HIDDEN),
                "attn_output": (HIDDEN, 64),
                "ffn_gate": (WIDTH, HIDDEN),
                "ffn_up": (WIDTH, HIDDEN),
                "ffn_down": (HIDDEN, WIDTH),
            }.items()
        }
    if not request.param:
        sizes["output.weight"] = (VOCABULARY, HIDDEN)
    random = np.random.default_rng()
    for name, size in sizes.items():
        values = random.standard_normal(size, dtype=np.float32)
        if len(size) == 2:
            packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, sum(int(np.prod(size)) for size in sizes.values())


def config_of(tmp_path, teacher, *overrides):
    path = tmp_path / "config.yaml"
    path.write_text(f"teacher: {{model: {teacher}}}\nstudent: {{model: smollm2-135m}}\ndata: {{train: data.jsonl}}\n")
    return load(path, list(overrides))


def test_the_shape_is_the_headers(file):
    path, weights = file
    shape = resolve_model(str(path), "teacher.model")
    assert count_parameters(shape).total == weights
    assert (shape.hidden, shape.vocabulary, len(shape.layers)) == (HIDDEN, VOCABULARY, LAYERS)
    mixer = shape.layers[0].mixer
    assert (mixer.heads, mixer.kv_heads, mixer.head_dim) == (4, 2, 16)


@pytest.mark.parametrize(("dtype", "element"), [("bfloat16", 2), ("float32", 4)])
def test_its_weights_are_held_in_the_teachers_dtype(file, tmp_path, dtype, element):
    path, _ = file
    work = workload_of(config_of(tmp_path, path, f"teacher.dtype={dtype}"))
    held = next(part for part in teacher_rank(work).phases[0].terms if part.name == "teacher weights")
    assert work.quantised is None
    assert held.value == element * count_parameters(work.teacher).backbone


def test_layouts_are_those_of_a_run(file, tmp_path):
    path, _ = file
    assert workload_of(config_of(tmp_path, path, "teacher.ranks_per_replica=2")).parallelism == "fsdp"
    with pytest.raises(UserError, match="not from GGUF"):
        workload_of(config_of(tmp_path, path, "teacher.ranks_per_replica=2", "teacher.parallelism=pipeline"))


def test_what_is_no_gguf_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"teacher.model: .*there is no such file"):
        resolve_model(str(tmp_path / "none.gguf"), "teacher.model")
    (tmp_path / "bad.gguf").write_bytes(b"no header")
    with pytest.raises(UserError, match="teacher.model: .*"):
        resolve_model(str(tmp_path / "bad.gguf"), "teacher.model")
