"""What `auto` comes to on a device, in a run and in its plan."""

import dataclasses

import pytest
import torch

from disaggkd_cli.config import Config, load
from disaggkd_cli.config.by_device import CPU_BUDGET, MOST_GPU_BUDGET, automatic_budget, loss_budget, student_dtype
from disaggkd_cli.jobs import run_job
from disaggkd_cli.losses import Head
from disaggkd_cli.planner.inputs import workload_of
from disaggkd_cli.training import process, student_module
from disaggkd_cli.training.student_module import StudentModule
from tests.support.families import micro_batch
from tests.support.models import tiny_model
from tests.support.runs import write_config

GIB = 2**30


@pytest.mark.parametrize(
    ("asked", "device", "dtype"),
    [("auto", "cpu", "float32"), ("auto", "cuda", "bfloat16"), ("float32", "cuda", "float32"),
     ("bfloat16", "cpu", "bfloat16")],
)  # fmt: skip
def test_the_dtype_follows_the_device_unless_it_is_given(asked, device, dtype):
    config = Config()
    assert config.student.dtype == "auto"
    config.student.dtype = asked
    assert student_dtype(config, device) == dtype


def test_the_budget_is_a_share_of_what_weights_and_optimizer_leave():
    free = 80 * GIB
    assert automatic_budget("cpu", free, 10**9, 10**9, 1) == CPU_BUDGET
    assert automatic_budget("cuda", free, 10**9, 10**9, 1) == MOST_GPU_BUDGET
    assert automatic_budget("cuda", free, 4 * 10**9, 4 * 10**9, 1) == 2 * GIB  # (80 - 59.6) / 8 = 2.5
    assert automatic_budget("cuda", free, 4 * 10**9, 0, 1) == MOST_GPU_BUDGET  # frozen: masters alone
    assert automatic_budget("cuda", free, 40 * 10**9, 40 * 10**9, 16) == automatic_budget(
        "cuda", free, 2_500_000_000, 2_500_000_000, 1
    )
    assert automatic_budget("cuda", GIB, 10**9, 10**9, 1) == CPU_BUDGET  # that it does not fit is for others to say


def test_a_few_megabytes_more_or_less_give_the_same_budget():
    budgets = {automatic_budget("cuda", 80 * GIB - used, 10**9, 10**9, 1) for used in range(0, 2 * GIB, GIB // 8)}
    assert len(budgets) == 1


def test_a_given_budget_is_taken_as_it_is():
    config = Config()
    config.loss.memory_budget = "64MiB"
    assert loss_budget(config, "cuda", 80 * GIB, 10**9, 10**9, 1) == 64 * 2**20


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_plan_has_the_budget_and_the_dtype_of_the_run(tmp_path, device):
    path = tmp_path / "run.yaml"
    path.write_text(
        "teacher: {model: qwen3-8b}\nstudent: {model: qwen3-1.7b, ranks: 4, replicate: 2}\n"
        f"data: {{train: data.jsonl}}\nlaunch: {{device: {device}}}\nhardware: {{gpu: H100-SXM}}\n"
    )
    config = load(path)
    work = workload_of(config)
    parameters = work.student_parameters.total
    memory = int(work.cluster.student_gpu.memory_bytes)
    assert work.memory_budget == loss_budget(config, device, memory, parameters, parameters, 2)
    assert work.student_bytes == (2 if device == "cuda" else 4)
    # The layout that is tried decides, and not the one that was asked for.
    alone = work.with_(student_ranks=1, replicate=1).memory_budget
    assert alone == loss_budget(config, device, memory, parameters, parameters, 1)
    assert work.with_(asked_budget=2**20).memory_budget == 2**20


def test_the_memory_of_a_gpu_is_what_others_leave_within_the_cap(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 15 * GIB)
    monkeypatch.delenv(process.GPU_CAP, raising=False)
    assert process.memory_for_this_process(device) == 75 * GIB
    monkeypatch.setenv(process.GPU_CAP, str(8 * GIB))
    assert process.memory_for_this_process(device) == 8 * GIB
    assert process.memory_for_this_process(torch.device("cpu")) == 0


@pytest.mark.parametrize("wire", [torch.float32, torch.float16])
def test_states_of_a_wider_format_meet_the_head_in_its_own_dtype(monkeypatch, wire):
    batch = micro_batch(False)
    config = Config()
    seen = []

    def watched(rows, head, states, teacher_head, labels, **arguments):
        seen.append((states.dtype, teacher_head.weight.dtype))
        return fused(rows, head, states, teacher_head, labels, **arguments)

    fused = student_module.fused_kd_loss
    monkeypatch.setattr(student_module, "fused_kd_loss", watched)
    model = tiny_model("llama")
    head = Head(torch.randn(model.config.vocab_size, 24).bfloat16())
    module = StudentModule(model, head, dataclasses.replace(config.loss))
    states = torch.randn(len(batch.rows), 24).bfloat16()
    wide, _ = module(batch, states.to(wire), batch.supervised_count)
    narrow, _ = module(batch, states, batch.supervised_count)
    assert {dtype for dtypes in seen for dtype in dtypes} == {torch.bfloat16}
    assert wire != torch.float32 or torch.equal(wide, narrow)  # as exact as it was


def test_a_dry_run_says_what_the_dtype_is(tmp_path, capsys):
    config = write_config(tmp_path / "run.yaml")
    code = run_job("run", str(config), [f"run_dir={tmp_path / 'run'}", "launch.device=cpu"], "never", 0, False, True)
    assert code == 0 and "student.dtype: auto is float32" in capsys.readouterr().out
