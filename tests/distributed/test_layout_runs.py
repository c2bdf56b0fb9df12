"""Whole runs in every layout of the student: the same first ten losses as one rank, and a way back from a stop."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig

from tests.support.runs import TINY_TEACHER, disaggkd, losses, metrics, run_to_end, write_config

TEN = ("train.steps=10", "train.eval_every=0", "train.save_every=5")
LAYOUTS = {
    "FSDP 2": ("student.ranks=2", "train.micro_batch_sequences=2"),
    "HSDP 2x1": ("student.ranks=2", "student.replicate=2", "train.micro_batch_sequences=2"),
    "HSDP 2x2": ("student.ranks=4", "student.replicate=2", "train.micro_batch_sequences=1"),
    "vocabulary-parallel 2": ("student.ranks=2", "loss.vocabulary_parallel=true", "train.micro_batch_sequences=2"),
    "vocabulary-parallel 2, HSDP 2x2": (
        "student.ranks=4", "student.replicate=2", "loss.vocabulary_parallel=true", "train.micro_batch_sequences=1",
    ),
}  # fmt: skip
FULL = [name for name in LAYOUTS if "vocabulary" not in name]
MATRIX = [
    (layout, implementation, tied, mode)
    for layout in LAYOUTS
    for implementation in ("fused", "full")
    for tied in (True, False)
    for mode in ("disaggregated", "colocated")
    if implementation == "fused" or (layout in FULL and mode == "colocated")
]


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """A configuration like the tiny teacher's whose head is a weight of its own; fresh weights come from the seed."""
    directory = tmp_path_factory.mktemp("untied")
    AutoConfig.from_pretrained(TINY_TEACHER, tie_word_embeddings=False, num_hidden_layers=2).save_pretrained(directory)
    return directory / "config.json"


@pytest.fixture(scope="module")
def one_rank(untied, tmp_path_factory):
    """Config and ten losses of one rank, by whether the head is tied."""
    found = {}
    for tied in (True, False):
        folder = tmp_path_factory.mktemp("one_rank")
        starts = {} if tied else {"student__from_teacher": None, "student__from_config": str(untied)}
        config = write_config(folder / "run.yaml", **starts)
        found[tied] = config, run_to_end(config, folder / "run", "mode=colocated", *TEN)
    return found


@pytest.mark.timeout(120)
def test_shared_heads_with_a_teacher_elsewhere(reference_config, tmp_path, reference):
    """Without a fixture of its own: the first ten losses do not depend on how many steps follow."""
    run = run_to_end(reference_config, tmp_path / "run", *LAYOUTS["vocabulary-parallel 2"], *TEN)
    assert losses(run) == pytest.approx(losses(reference)[:10], rel=1e-5)
    for name in ("kd", "ce", "top1_agreement", "grad_norm", "eval_lm_loss", "eval_kd"):
        ours, theirs = ([line[name] for line in metrics(one) if name in line] for one in (run, reference))
        count = 1 if name.startswith("eval") else 10
        assert ours[:count] == pytest.approx(theirs[:count], rel=1e-4), name


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("layout", "implementation", "tied", "mode"), MATRIX)
def test_same_losses_in_every_layout(layout, implementation, tied, mode, one_rank, tmp_path):
    config, reference = one_rank[tied]
    arguments = (f"mode={mode}", f"loss.implementation={implementation}", *LAYOUTS[layout], *TEN)
    run = run_to_end(config, tmp_path / "run", *arguments)
    assert len(losses(run)) == 10
    assert losses(run) == pytest.approx(losses(reference), rel=1e-5)
    ours, theirs = (load_file(one / "student" / "model.safetensors") for one in (run, reference))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert (tensor - theirs[name]).norm() <= 1e-3 * theirs[name].norm(), name


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("before", "after"),
    [("FSDP 2", "vocabulary-parallel 2"), ("vocabulary-parallel 2", "HSDP 2x1"), ("HSDP 2x1", "FSDP 2")],
)
def test_a_stopped_run_goes_on_in_another_layout(before, after, one_rank, tmp_path):
    config, reference = one_rank[True]
    run = tmp_path / "run"
    code, output = disaggkd("run", str(config), f"run_dir={run}", *LAYOUTS[before], *TEN, "train.stop_at=4")
    assert code == 75, output
    code, output = disaggkd("run", str(config), f"run_dir={run}", *LAYOUTS[after], *TEN, "--resume", "auto")
    assert code == 0, output
    assert losses(run) == pytest.approx(losses(reference), rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_auto_says_what_it_chose(one_rank, tmp_path):
    config, reference = one_rank[True]
    arguments = (*LAYOUTS["FSDP 2"], *TEN, "loss.vocabulary_parallel=auto", "mode=colocated")
    code, output = disaggkd("run", str(config), f"run_dir={tmp_path}/run", *arguments)
    assert code == 0, output
    assert "loss.vocabulary_parallel=auto: rows are gathered" in output
    assert losses(tmp_path / "run") == pytest.approx(losses(reference), rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_compiled_layers_and_named_attention_kernels(one_rank, tmp_path):
    config, reference = one_rank[True]
    arguments = ("student.compile=true", "student.attention=eager", "teacher.attention=sdpa", "mode=colocated")
    run = tmp_path / "run"
    arguments = (f"run_dir={run}", *LAYOUTS["vocabulary-parallel 2"], *TEN, *arguments)
    code, output = disaggkd("run", str(config), *arguments, timeout=380)  # two ranks compile C++ on two cores
    assert code == 0, output
    assert losses(run) == pytest.approx(losses(reference), rel=1e-4)
    assert json.loads((run / "student" / "config.json").read_text())["num_hidden_layers"] == 2
