"""Whole runs in every layout of the student: the same first ten losses as one rank, and a way back from a stop."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig

from tests.support.ranks import run_together
from tests.support.runs import TINY_TEACHER, disaggkd, losses, metrics, run_to_end, status, write_config

TEN = ("train.steps=10", "train.eval_every=0", "train.save_every=5")
CUT = "loss.vocabulary_parallel=true"
LAYOUTS = {
    "one rank": (1, ()),
    "FSDP 2": (2, ("train.micro_batch_sequences=2",)),
    "HSDP 2x1": (2, ("student.replicate=2", "train.micro_batch_sequences=2")),
    "vocabulary-parallel 2": (2, (CUT, "train.micro_batch_sequences=2")),
    "HSDP 2x2": (4, ("student.replicate=2", "train.micro_batch_sequences=1")),
    "vocabulary-parallel 2, HSDP 2x2": (4, (CUT, "student.replicate=2", "train.micro_batch_sequences=1")),
}
MATRIX = [
    (layout, implementation, tied)
    for layout, (_, changes) in LAYOUTS.items()
    for implementation in ("fused", "full")
    for tied in (True, False)
    if implementation == "fused" or CUT not in changes
]


def arguments_of(layout: str) -> tuple[str, ...]:
    ranks, changes = LAYOUTS[layout]
    return (f"student.ranks={ranks}", *changes, *TEN)


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """Two students, by whether the head is tied: cut out of the teacher, or with fresh weights from the seed."""
    folder = tmp_path_factory.mktemp("configs")
    AutoConfig.from_pretrained(TINY_TEACHER, tie_word_embeddings=False, num_hidden_layers=2).save_pretrained(folder)
    untied = {"student__from_teacher": None, "student__from_config": str(folder / "config.json")}
    return {True: write_config(folder / "tied.yaml"), False: write_config(folder / "untied.yaml", **untied)}


@pytest.fixture(scope="module")
def matrix(configs, tmp_path_factory):
    """Run directories of the whole matrix; the ranks of each size start once."""
    folder = tmp_path_factory.mktemp("matrix")
    found = {case: folder / str(index) for index, case in enumerate(MATRIX)}
    jobs = {1: [], 2: [], 4: []}
    for (layout, implementation, tied), run in found.items():
        ranks, changes = LAYOUTS[layout]
        jobs[ranks].append((configs[tied], run, (*changes, *TEN, f"loss.implementation={implementation}")))
    for ranks, of_these in jobs.items():
        run_together(ranks, of_these)
    return found


@pytest.mark.timeout(120)
def test_shared_heads_with_a_teacher_elsewhere(reference_config, tmp_path, reference):
    """The first ten losses do not depend on how many steps follow."""
    run = run_to_end(reference_config, tmp_path / "run", *arguments_of("vocabulary-parallel 2"))
    assert losses(run) == pytest.approx(losses(reference)[:10], rel=1e-5)
    for name in ("kd", "ce", "top1_agreement", "grad_norm", "eval_lm_loss", "eval_kd"):
        ours, theirs = ([line[name] for line in metrics(one) if name in line] for one in (run, reference))
        count = 1 if name.startswith("eval") else 10
        assert ours[:count] == pytest.approx(theirs[:count], rel=1e-4), name


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("layout", "implementation", "tied"), MATRIX)
def test_same_losses_in_every_layout(layout, implementation, tied, matrix):
    run, reference = matrix[layout, implementation, tied], matrix["one rank", "fused", tied]
    assert not [path.read_text() for path in run.glob("failed.*")]
    assert status(run)["state"] == "finished"
    assert len(losses(run)) == 10
    assert losses(run) == pytest.approx(losses(reference), rel=1e-5)
    ours, theirs = (load_file(one / "student" / "model.safetensors") for one in (run, reference))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert (tensor - theirs[name]).norm() <= 1e-4 * theirs[name].norm(), name


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", ["HSDP 2x1", "vocabulary-parallel 2, HSDP 2x2"])
def test_copies_with_a_teacher_elsewhere(layout, reference_config, tmp_path, reference):
    run = run_to_end(reference_config, tmp_path / "run", *arguments_of(layout))
    assert losses(run) == pytest.approx(losses(reference)[:10], rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("before", "after"),
    [("FSDP 2", "vocabulary-parallel 2"), ("vocabulary-parallel 2", "HSDP 2x1"), ("HSDP 2x1", "FSDP 2")],
)
def test_a_stopped_run_goes_on_in_another_layout(before, after, configs, tmp_path, reference):
    command = ("run", str(configs[True]), f"run_dir={tmp_path}/run", "mode=colocated")
    code, output = disaggkd(*command, *arguments_of(before), "train.stop_at=4")
    assert code == 75, output
    code, output = disaggkd(*command, *arguments_of(after), "--resume", "auto")
    assert code == 0, output
    assert losses(tmp_path / "run") == pytest.approx(losses(reference)[:10], rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_auto_says_what_it_chose(configs, tmp_path, reference):
    arguments = (*arguments_of("FSDP 2"), "loss.vocabulary_parallel=auto", "mode=colocated")
    code, output = disaggkd("run", str(configs[True]), f"run_dir={tmp_path}/run", *arguments)
    assert code == 0, output
    assert "loss.vocabulary_parallel=auto: rows are gathered" in output
    assert losses(tmp_path / "run") == pytest.approx(losses(reference)[:10], rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_compiled_layers_and_named_attention_kernels(configs, tmp_path, reference):
    run = tmp_path / "run"
    arguments = ("mode=colocated", "student.compile=true", "student.attention=eager", "teacher.attention=sdpa")
    arguments = (f"run_dir={run}", *arguments_of("vocabulary-parallel 2"), *arguments)
    code, output = disaggkd("run", str(configs[True]), *arguments, timeout=380)  # two ranks compile C++ on two cores
    assert code == 0, output
    assert losses(run) == pytest.approx(losses(reference)[:10], rel=1e-4)
    assert json.loads((run / "student" / "config.json").read_text())["num_hidden_layers"] == 2
