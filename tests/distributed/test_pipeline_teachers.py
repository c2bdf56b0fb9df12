"""Teachers as pipelines of stages: one rank's run to the last bit, whatever happens to any stage."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from disaggkd_cli.data import load_tokenizer
from tests.distributed.test_run_faults import assert_undisturbed, steps_done, wait_until
from tests.distributed.test_teacher_replicas import process_of
from tests.support.models import tiny_model
from tests.support.runs import (
    TINY_TEACHER,
    descendants,
    disaggkd,
    finish,
    losses,
    metrics,
    run_to_end,
    start,
    status,
    write_config,
)


def pipeline_of(stages: int) -> tuple[str, ...]:
    return (f"teacher.ranks_per_replica={stages}", "teacher.parallelism=pipeline")


def slow(stages: int, replicas: int = 1) -> str:
    """An order to every last stage to take so long for each forward that there is time to disturb a run."""
    return ",".join(f"stage {replica}.{stages - 1}.forward:sleep:0.3" for replica in range(replicas))


def log_of(run, rank: str) -> str:
    return (run / "logs" / f"teacher_{rank}.log").read_text()


def await_service(run) -> None:
    """Wait until replica 0 answers and the student trains."""
    log = run / "logs" / "teacher_0.0.log"
    wait_until(lambda: log.exists() and "serves student 0" in log.read_text(), "link of replica 0", 120)
    wait_until(lambda: steps_done(run) >= 2, "second step", 120)


def test_two_stages_give_the_same_run_to_the_last_bit(reference_config, reference, tmp_path):
    run = run_to_end(reference_config, tmp_path / "run", *pipeline_of(2))
    assert_undisturbed(run, reference)
    text = log_of(run, "0.0")
    assert "stages by parameters: layers 0-1 | 2-3 (slowest" in text and "stages by measured time: layers" in text
    assert "2 stages, at most 4 requests inside" in text
    stages = status(run)["teacher_stages"]
    assert [(stage["rank"], stage["most_inside"]) for stage in stages] == [("teacher 0.0", 4), ("teacher 0.1", 4)]
    idle = [line["stage_idle_share"] for line in metrics(run) if "loss" in line][-1]
    assert sorted(idle) == ["teacher 0.0", "teacher 0.1"] and all(0 <= share <= 1 for share in idle.values())
    computed = [int(re.search(r"(\d+) requests computed", log_of(run, f"0.{rank}")).group(1)) for rank in range(2)]
    assert computed[0] == computed[1] >= 20


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("arguments", [(), ("student.ranks=2", "train.micro_batch_sequences=2"), ("data.packing=on",)])
@pytest.mark.parametrize("stages", [2, 3])
def test_same_losses_as_one_rank_in_other_layouts_of_the_student(reference_config, tmp_path, stages, arguments):
    one = run_to_end(reference_config, tmp_path / "one", *arguments)
    run = run_to_end(reference_config, tmp_path / "run", *pipeline_of(stages), *arguments)
    assert_undisturbed(run, one)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("wire", ["float32", "float8"])
@pytest.mark.parametrize("family", ["llama", "qwen3_5_moe_text", "gemma2", "gpt_oss"])
def test_every_kind_of_teacher_with_two_and_three_stages(family, wire, tmp_path):
    tokenizer = load_tokenizer(TINY_TEACHER)
    vocabulary = AutoConfig.from_pretrained(TINY_TEACHER).vocab_size
    tiny_model(family, vocab_size=vocabulary).save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    config = write_config(
        tmp_path / "run.yaml", teacher__model=str(tmp_path / "teacher"), student__from_teacher=None,
        student__model=str(TINY_TEACHER), transport__dtype=wire, train__steps=10, train__eval_every=0,
    )  # fmt: skip
    one = losses(run_to_end(config, tmp_path / "one"))
    assert len(one) == 10
    for stages in (2, 3):
        assert losses(run_to_end(config, tmp_path / f"run{stages}", *pipeline_of(stages))) == one


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_killed_stage_takes_its_replica_along_and_all_of_it_comes_back(reference_config, reference, tmp_path, rank):
    run = tmp_path / "run"
    job = start(
        ["run", str(reference_config), f"run_dir={run}", *pipeline_of(3)],
        DISAGGKD_TESTING="1", DISAGGKD_FAULT=slow(3),
    )  # fmt: skip
    await_service(run)
    os.kill(process_of("teacher 0", rank, run), signal.SIGKILL)
    code, output = finish(job, 240)
    assert code == 0, output
    assert f"teacher 0.{rank} was killed by SIGKILL; starting it again with all 3 ranks of its replica" in output
    assert "Traceback" not in output
    assert_undisturbed(run, reference)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("victim", ["stage 0.0", "stage 0.1", "teacher 0.0"])
def test_killed_while_a_payload_travels_and_gone_for_good(reference_config, reference, tmp_path, victim):
    """From stage to stage, from the last back to the first, and from the first to the student."""
    run = tmp_path / "run"
    code, output = disaggkd(
        "run", str(reference_config), f"run_dir={run}", "teacher.replicas=2", *pipeline_of(2), "--restarts", "0",
        DISAGGKD_TESTING="1", DISAGGKD_FAULT=f"{slow(2, 2)},{victim}.payload:kill@3", timeout=300,
    )  # fmt: skip
    assert code == 0, output
    assert "going on without it" in output
    assert_undisturbed(run, reference)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_stalled_middle_stage_is_noticed_within_the_timeout(reference_config, reference, tmp_path):
    run = tmp_path / "run"
    job = start(
        ["run", str(reference_config), f"run_dir={run}", *pipeline_of(3), "transport.timeout=6"],
        DISAGGKD_TESTING="1", DISAGGKD_FAULT=slow(3),
    )  # fmt: skip
    await_service(run)
    stalled, last = process_of("teacher 0", 1, run), process_of("teacher 0", 2, run)
    os.kill(stalled, signal.SIGSTOP)
    began = time.monotonic()
    wait_until(lambda: process_of("teacher 0", 2, run) != last, "end of the stage behind it", 40)
    print(f"noticed after {time.monotonic() - began:.1f} s with transport.timeout=6")
    code, output = finish(job, 240)
    assert code == 0, output
    assert_undisturbed(run, reference)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_to_any_stage_ends_the_replica_well(reference_config, reference, tmp_path, rank):
    run = tmp_path / "run"
    job = start(
        ["run", str(reference_config), f"run_dir={run}", "teacher.replicas=2", *pipeline_of(2)],
        DISAGGKD_TESTING="1", DISAGGKD_FAULT=slow(2, 2),
    )  # fmt: skip
    await_service(run)
    os.kill(process_of("teacher 0", rank, run), signal.SIGTERM)
    code, output = finish(job, 240)
    assert code == 0, output
    assert "starting it again" not in output
    assert "told to stop" in log_of(run, "0.0")
    assert_undisturbed(run, reference)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_forward_that_fails_on_one_stage_is_asked_for_again(reference_config, reference, tmp_path):
    run = tmp_path / "run"
    code, output = disaggkd(
        "run", str(reference_config), f"run_dir={run}", *pipeline_of(3),
        DISAGGKD_TESTING="1", DISAGGKD_FAULT="stage 0.1.forward:raise@9",
    )  # fmt: skip
    assert code == 0, output
    assert "teacher 0.1: RuntimeError: a fault ordered by the test" in log_of(run, "0.0")
    assert_undisturbed(run, reference)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_under_torchrun(reference_config, reference, tmp_path):
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "-m", "disaggkd_cli",
         "run", str(reference_config), f"run_dir={run}", *pipeline_of(2)],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert_undisturbed(run, reference)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_cannot_be_cut_is_refused_with_the_reason(reference_config, tmp_path):
    code, output = disaggkd("run", str(reference_config), f"run_dir={tmp_path}/run", *pipeline_of(5))
    assert code == 2, output
    assert "teacher.ranks_per_replica: 5 stages, but" in output
    assert descendants(str(tmp_path)) == []


_READ_ONE_STAGE = """
import sys
import torch
from disaggkd_cli.models import resolve_source
from disaggkd_cli.models.load import without_weights
from disaggkd_cli.models.load_stage import load_stage, stage_bytes
from disaggkd_cli.models.stages import prove_stages

def peak():
    # Not getrusage, whose figure a child takes over from its parent.
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024

source = resolve_source(sys.argv[1])
model = without_weights(source, torch.bfloat16, "teacher.model")
anatomy = prove_stages(model, torch.bfloat16, torch.device("cpu"), "auto", "it")
open("/proc/self/clear_refs", "w").write("5")  # counted anew from here
before = peak()
stage = load_stage(source, model, anatomy, (int(sys.argv[2]), int(sys.argv[3])), "auto")
for tensor in stage.backbone.state_dict().values():
    tensor.max()  # a tensor read from a mapped file takes memory once it is looked at
print(peak() - before, stage_bytes(stage))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_stage_of_a_large_model_reads_only_its_own_layers(tmp_path):
    """2 GiB in four stages: the resident memory of none grows by more than its own weights and a little."""
    config = AutoConfig.for_model(
        "llama", hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=16,
        num_key_value_heads=16, vocab_size=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert size > 2 * 2**30
    model.save_pretrained(tmp_path)
    del model
    room = 160 * 2**20
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}

    def read(first: int, stop: int) -> tuple[int, int]:
        command = [sys.executable, "-c", _READ_ONE_STAGE, str(tmp_path), str(first), str(stop)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
        grown, held = map(int, done.stdout.split()[-2:])
        print(f"layers {first}-{stop - 1}: {held / 2**20:.0f} MiB of weights, {grown / 2**20:.0f} MiB more resident")
        return grown, held

    for first in (0, 4, 8, 12):
        grown, held = read(first, first + 4)
        assert 0.9 * held <= grown < held + room
        assert held < size * 0.27
    grown, held = read(0, 16)
    assert grown > 0.9 * size, "the measure would not have shown the others' layers"
