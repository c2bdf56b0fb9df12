"""Alternatives to the three modes, with figures worked by hand."""

import math
from dataclasses import replace

import pytest

from disaggkd_cli.layouts import TeacherFacts, facts_of
from disaggkd_cli.planner.alternatives import alternatives, offloaded, pipeline, recorded
from disaggkd_cli.planner.cost import Cost
from disaggkd_cli.planner.memory import colocated_rank
from disaggkd_cli.planner.plan import as_json, make_plan
from disaggkd_cli.planner.report_html import render_html
from disaggkd_cli.planner.timing import colocated_timing, teacher_time

from .planner_toys import toy_model, toy_work


def value(one, name):
    return next(part.value for part in one.figures if part.name == name)


def test_offloading_frees_shard_and_embedding_and_pays_for_the_way_in():
    work = toy_work(accumulation=3)
    one = offloaded(work)
    # Three layers at hidden 16: q 16*8, k and v 16*4, o 8*16, MLP 3*16*16, two norms of 16; embedding 32*16; norm 16.
    backbone = 3 * (128 + 2 * 64 + 128 + 768 + 32) + 512 + 16
    shard = 2 * backbone / 4
    assert value(one, "GPU memory freed while the student trains") == shard + 2 * (32 + 1) * 16
    assert value(one, "host memory of one node") == 4 * shard
    load = shard / (64e9 * 0.87)
    assert value(one, "load of the teacher, a step") == pytest.approx(load)
    # The student's step: 4 ranks, 3 micro-batches of 64 tokens.
    step = 4 * 3 * 64 / colocated_timing(work, fused=True).tokens_per_second
    assert one.tokens_per_second == pytest.approx(4 * 3 * 64 / (step + load))
    # Two micro-batches' hidden states of 64 rows wait.
    before, after = colocated_rank(work, fused=True), one.ranks["colocated"]
    waiting = 2 * 64 * 16 * 2
    assert after.phases[0].bytes - before.phases[0].bytes == waiting
    for phase, was in zip(after.phases[1:], before.phases[1:], strict=True):
        assert was.bytes - phase.bytes == pytest.approx(shard + 2 * 33 * 16 - waiting)
    assert not one.runs and "no offload" in one.how


def test_recorded_bytes_read_rate_and_passes():
    work = toy_work(steps=10, accumulation=2, supervised=0.5)
    tokens = 10 * 4 * 2 * 64
    replay = recorded(work, None).cost
    once = tokens * teacher_time(work).value / 64
    # A live run that takes twice a replay's GPU-hours: the difference is one replay.
    live = Cost(8, 0, None, replay.tokens_per_second)
    one = recorded(work, live)
    assert value(one, "bytes on disk") == tokens * 0.5 * 16 * 2
    assert value(one, "read rate, bytes per second") == pytest.approx(one.tokens_per_second * 0.5 * 16 * 2)
    assert value(one, "seconds of one GPU to record") == pytest.approx(once)
    saved = tokens / replay.tokens_per_second * 4
    assert value(one, "passes that repay the recording") == math.ceil(once / saved)
    assert one.runs and one.cost.teacher_gpus == 0 and "teacher" not in one.ranks


def test_a_recording_that_is_dearer_than_the_live_run_is_never_repaid():
    work = toy_work()
    replay = recorded(work, None).cost
    one = recorded(work, Cost(4, 0, None, 2 * replay.tokens_per_second))
    assert "no number of passes" in one.notes[1]
    assert all(part.name != "passes that repay the recording" for part in one.figures)


def test_passes_are_counted_in_money_where_prices_are_known():
    work = toy_work()
    work = work.with_(cluster=replace(work.cluster, student_price=2.0, teacher_price=8.0))
    replay = recorded(work, None).cost
    tokens = work.steps * work.step_tokens
    # Live at the replay's speed with one teacher more: 8 an hour above it.
    one = recorded(work, Cost(4, 1, 4 * 2.0 + 8.0, replay.tokens_per_second))
    once = tokens * teacher_time(work).value / 64 / 3600 * 8
    assert value(one, "passes that repay the recording") == math.ceil(once / (replay.hours(tokens) * 8))


def test_a_recorder_that_one_rank_cannot_be_is_said():
    small = replace(toy_work().cluster.teacher_gpu, memory_gib=1.1)
    work = toy_work(teacher=toy_model(64, hidden=8192, name="large"))
    work = work.with_(cluster=replace(work.cluster, teacher_gpu=small))
    one = recorded(work, None)
    assert not one.runs and "one rank must hold the teacher" in one.how
    assert len(one.notes) == 1 and "recording" not in one.notes[0]


def test_pipelines_keep_the_student_busy_within_the_limit():
    one = pipeline(toy_work())
    # Two ranks hold three layers: stages of two and one, so the slowest takes two thirds of the forward.
    whole = teacher_time(toy_work()).value
    assert one.figures[0].value == pytest.approx(whole * 2 / 3)
    student = recorded(toy_work(), None).tokens_per_second
    replicas = math.ceil(student * (whole * 2 / 3) / 64)
    assert one.cost.teacher_gpus == 2 * replicas
    assert one.runs and one.fits and f"teacher.replicas={replicas}" in one.how
    over = pipeline(toy_work(), gpus=5)
    assert not over.fits and "it takes 6 GPUs, and there are 5" in over.why_not


def test_a_pipeline_that_a_run_refuses_is_no_alternative():
    facts: TeacherFacts = facts_of({"model_type": "zamba2", "num_hidden_layers": 3}, "teacher")
    one = pipeline(toy_work(teacher_facts=facts))
    assert not one.runs and not one.fits and "cannot be cut into stages" in one.how


def test_plans_carry_them_in_json_and_on_the_page():
    plan = make_plan(toy_work())
    found = as_json(plan)["alternatives"]
    assert list(found) == ["teacher_offloaded", "recorded", "pipeline"] == [one.name for one in plan.alternatives]
    assert [one["run_can"] for one in found.values()] == [False, True, True]
    page = render_html(plan)
    assert all(one.title in page and str(one.cost.gpus) in page for one in plan.alternatives)
    assert alternatives(plan.work, plan.work, None)[1].notes[1].startswith("no number of passes")
