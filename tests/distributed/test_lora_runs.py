"""Runs that train adapters only: the base stays as it was, and both forms of the result load."""

import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.runs import TINY_TEACHER, disaggkd, losses, run_to_end, write_config

pytestmark = pytest.mark.timeout(240)
ADAPTERS = {"rank": 8, "alpha": 16.0, "targets": ["q_proj", "v_proj", "down_proj"]}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A student of the teacher's own layers, so that its base can be compared with the teacher's weights."""
    directory = tmp_path_factory.mktemp("lora")
    student = {"from_teacher": {"layers": [0, 1]}, "lora": ADAPTERS}
    return write_config(directory / "run.yaml", student=student, train__learning_rate=1.0e-2)


@pytest.fixture(scope="module")
def run(config):
    return run_to_end(config, config.parent / "run")


def test_adapters_learn(run):
    assert losses(run)[-1] < 0.9 * losses(run)[0]


@pytest.mark.slow
def test_two_ranks_train_the_same_adapters(config, run, tmp_path):
    two = run_to_end(config, tmp_path / "two", "student.ranks=2", "train.micro_batch_sequences=2")
    assert losses(two) == pytest.approx(losses(run), rel=1e-5)


def test_all_but_the_targets_is_as_it_was_and_both_exports_agree(run, tmp_path):
    merged = load_file(run / "student" / "model.safetensors")
    teacher = AutoModelForCausalLM.from_pretrained(TINY_TEACHER, dtype=torch.float32).state_dict()
    changed = {name.split(".")[-2] for name, tensor in merged.items() if not torch.equal(tensor, teacher[name])}
    assert changed == set(ADAPTERS["targets"])
    base = tmp_path / "base"
    shutil.copytree(run / "student", base)
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    plain.load_state_dict({name: teacher[name] for name in plain.state_dict()})
    adapted = PeftModel.from_pretrained(plain, run / "student" / "adapters").eval()
    ids = torch.arange(40, 60)[None]
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, whole(ids).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_resumed_run_trains_the_same_adapters(config, run, tmp_path):
    directory = tmp_path / "stopped"
    code, output = disaggkd("run", str(config), f"run_dir={directory}", "train.stop_at=9")
    assert code == 75, output
    code, output = disaggkd("run", str(config), f"run_dir={directory}", "--resume", "auto")
    assert code == 0, output
    mine = load_file(directory / "student" / "adapters" / "adapter_model.safetensors")
    theirs = load_file(run / "student" / "adapters" / "adapter_model.safetensors")
    assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())


def test_the_check_passes(config):
    code, output = disaggkd("check", str(config))
    assert code == 0, output


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("student.lora.targets=[lm_head]", "student.lora.targets: the LM head cannot have an adapter"),
        ("student.lora.rank=0", "student.lora.rank: 0 must be at least 1"),
        ("student.lora.targets=[q_prog]", "student.lora.targets: "),
    ],
)
def test_mistakes(config, tmp_path, override, said):
    code, output = disaggkd("run", str(config), f"run_dir={tmp_path / 'run'}", override)
    assert code == 2, output
    assert said in output
