"""Models read part by part: the same bits as models loaded whole."""

import copy

import pytest
import torch

from disaggkd_cli.config import Config
from disaggkd_cli.config.models import FromTeacherConfig, LoraConfig
from disaggkd_cli.errors import UserError
from disaggkd_cli.models import load_causal_lm, resolve_source, student_from_layers
from disaggkd_cli.models.fill import fill
from disaggkd_cli.models.hollow import ReadWhole, hollow_lm, hollow_student
from disaggkd_cli.models.load import without_weights
from disaggkd_cli.models.lora import add_adapters
from disaggkd_cli.models.parts import grouped, read_parts, units_of, verified
from tests.support.models import tiny_model

CPU = torch.device("cpu")
FAMILIES = [
    "llama",
    "gpt2",
    "gemma3_text",
    "qwen3_moe",
    "qwen3_5_moe_text",
    "deepseek_v3",
    "gpt_oss",
    "granitemoehybrid",
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    def save(family: str):
        path = tmp_path_factory.mktemp(family)
        tiny_model(family).save_pretrained(path)
        return path

    return save


def tensors_of(model):
    return {**model.state_dict(), **dict(model.named_buffers())}


def assert_same(one, other):
    mine, theirs = tensors_of(one), tensors_of(other)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert (tensor.dtype, tensor.stride()) == (theirs[name].dtype, theirs[name].stride())
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_together_are_the_model_that_is_loaded_whole(saved, family, dtype):
    source = resolve_source(str(saved(family)))
    whole = load_causal_lm(source, dtype, "student.model")
    hollow = hollow_lm(source, dtype, "student.model")
    assert {one.device.type for one in tensors_of(hollow.model).values()} == {"meta"}
    parts = read_parts(source, hollow.model, "student.model", part_bytes=1)
    fill(hollow.model, parts, CPU)
    assert_same(hollow.model, whole)
    assert hollow.model.generation_config.to_dict() == whole.generation_config.to_dict()
    ids = torch.arange(6)[None]
    whole = copy.deepcopy(whole)  # tensors of mapped files lie at other addresses, where products may round otherwise
    assert torch.equal(hollow.model(input_ids=ids).logits, whole(input_ids=ids).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_part_is_larger_than_a_unit_and_none_comes_twice(saved, family):
    source = resolve_source(str(saved(family)))
    model = without_weights(source, torch.float32, "student.model")
    sizes = {name: tensor.nbytes for name, tensor in model.state_dict().items()}
    largest = max(sum(sizes[name] for name in names) for names in units_of(model).values())
    groups = grouped(model, lambda name: True, part_bytes=1)
    assert sorted(name for group in groups for name in group) == sorted(sizes)
    assert max(sum(sizes[name] for name in group) for group in groups) == largest < sum(sizes.values()) / 2
    assert len(grouped(model, lambda name: True)) == 1  # small models are read in one go


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe", "qwen3_5_text"])
def test_a_student_of_the_teachers_layers_reads_only_those(saved, family):
    path = saved(family)
    config = Config()
    config.teacher.model = str(path)
    config.student.from_teacher = FromTeacherConfig([0, 3])
    hollow = hollow_student(config)
    fill(hollow.model, hollow.parts, CPU)
    teacher = load_causal_lm(resolve_source(str(path)), torch.float32, "teacher.model")
    assert_same(hollow.model, student_from_layers(teacher, [0, 3], torch.float32).eval())


def test_adapters_are_drawn_as_beside_a_whole_model(saved):
    path = saved("llama")
    config = Config()
    config.student.model = str(path)
    config.student.lora = LoraConfig(rank=3, targets="all-linear")
    whole = load_causal_lm(resolve_source(str(path)), torch.float32, "student.model")
    add_adapters(whole, config.student.lora, config.seed)
    hollow = hollow_student(config)
    fill(hollow.model, hollow.parts, CPU)
    assert_same(hollow.model, whole)
    trained = {name: one.requires_grad for name, one in whole.named_parameters()}
    assert trained == {name: one.requires_grad for name, one in hollow.model.named_parameters()}


def test_what_cannot_be_read_in_parts_says_why(saved, tmp_path):
    config = Config()
    config.student.model, config.student.from_config = None, str(saved("llama"))
    with pytest.raises(ReadWhole, match="drawn in one go"):
        hollow_student(config)
    model = tiny_model("llama")
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ReadWhole, match="no safetensors"):
        hollow_lm(resolve_source(str(tmp_path)), torch.float32, "student.model")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda part: part["model.layers.1.mlp.up_proj.weight"][0].fill_(torch.nan),
            r"up_proj.weight \(32 of .* are NaN",
        ),
        (lambda part: part["model.embed_tokens.weight"].zero_(), "embed_tokens.weight .* nothing but zeros"),
        (lambda part: part["lm_head.weight"].zero_(), "lm_head.weight .* nothing but zeros"),
    ],
)
def test_values_of_no_trained_model_are_named(saved, spoil, message):
    hollow = hollow_lm(resolve_source(str(saved("llama"))), torch.float32, "student.model")
    parts = [copy.deepcopy(part) for part in hollow.parts]
    assert len(list(verified(iter(parts), hollow.model, "the student"))) == 1
    spoil(parts[0])
    with pytest.raises(UserError, match=f"the student: .*{message}"):
        list(verified(iter(parts), hollow.model, "the student"))
