"""The command as a whole: the contract of its JSON, its text and page, sweeps, explanations, calibration, and speed."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from disaggkd_cli import terminal
from disaggkd_cli.config import Config, load
from disaggkd_cli.errors import UserError
from disaggkd_cli.planner.command import EXIT_NOTHING_FITS, PlanOptions, plan_command
from disaggkd_cli.planner.fit import fits, frontier, largest_teacher, smallest_remedy, with_tokens
from disaggkd_cli.planner.inputs import workload_of
from disaggkd_cli.planner.models import resolve_model
from disaggkd_cli.planner.plan import as_json, make_plan
from disaggkd_cli.planner.report_html import render_html
from disaggkd_cli.planner.split import ideal_ratio
from disaggkd_cli.planner.sweep import parse_sweep
from disaggkd_cli.planner.timing import recommended_ring_depth
from disaggkd_cli.planner.workload import MODES

from .planner_toys import toy_work

ROOT = Path(__file__).parents[3]
PAIRS = ("qwen3.5-35b-a3b-to-9b", "qwen3-235b-a22b-to-8b", "qwen3.5-397b-a17b-to-35b-a3b")


def run_plan(config: Config, **options: object) -> tuple[int, str]:
    console = terminal.console(file=io.StringIO(), width=140)
    code = plan_command(config, PlanOptions(**options), console)
    return code, console.file.getvalue()


@pytest.fixture(params=PAIRS)
def pair(request) -> Config:
    return load(ROOT / "configs" / f"{request.param}.yaml")


@pytest.fixture
def reference() -> Config:
    return load(ROOT / "configs" / f"{PAIRS[0]}.yaml")


def test_json_keeps_the_contract(pair):
    code, text = run_plan(pair, json=True)
    plan = json.loads(text)
    assert code == 0
    assert {"parameters", "active_parameters"} <= set(plan["teacher"]) & set(plan["student"])
    assert tuple(plan["modes"]) == MODES
    for mode, one in plan["modes"].items():
        assert {"fits", "ranks", "traffic", "tokens_per_second", "bottleneck", "max_micro_batch_tokens"} <= set(one)
        assert set(one["ranks"]) == ({"student", "teacher"} if mode == "disaggregated_fused" else {"colocated"})
        for rank in one["ranks"].values():
            assert rank["phases"][rank["binding_phase"]] == rank["peak_bytes"] == max(rank["phases"].values())
            assert sum(rank["components"].values()) == pytest.approx(rank["peak_bytes"], abs=len(rank["components"]))
        assert {"hidden_states_bytes_per_token", "logits_bytes_per_token"} <= set(one["traffic"])
    assert {"mode", "reason", "take", "limited_by", "change"} == set(plan["recommendation"])
    assert plan["not_modelled"]


def test_reference_pair_costs_4096_bytes_a_token(reference):
    plan = as_json(make_plan(workload_of(reference)))
    traffic = plan["modes"]["disaggregated_fused"]["traffic"]
    assert (traffic["hidden_states_bytes_per_token"], traffic["logits_bytes_per_token"]) == (4096, 496_640)


@pytest.mark.parametrize("name", PAIRS[1:])
def test_larger_pairs_fit_apart_and_not_together(name):
    plan = as_json(make_plan(workload_of(load(ROOT / "configs" / f"{name}.yaml"))))
    fitting = {mode: one["fits"] for mode, one in plan["modes"].items()}
    assert fitting == {"colocated_full": False, "colocated_fused": False, "disaggregated_fused": True}
    assert plan["recommendation"]["mode"] == "disaggregated_fused"
    assert "colocated does not fit even with the fused loss" in plan["recommendation"]["reason"]


def balanced(student_ranks: int):
    """A small pair with as many teachers as keep the student busy."""
    work = toy_work(
        teacher=resolve_model("qwen3-8b", "t"),
        student=resolve_model("qwen3-0.6b", "s"),
        micro_batch_tokens=32_768,
        sequence=4096,
        checkpointing=True,
        student_ranks=student_ranks,
    )
    work = work.with_(replicas=round(ideal_ratio(work) * student_ranks))
    return work.with_(ring_depth=recommended_ring_depth(work))


def test_the_guide_decides_between_equals():
    """A small teacher and one or two nodes: together. More nodes: apart. A clear difference wins anyway."""
    near = make_plan(balanced(8), with_knobs=False)
    assert near.verdict.mode == "colocated_fused"
    assert "fewer parts" in near.verdict.reason
    far = make_plan(balanced(32), with_knobs=False)
    assert far.verdict.mode == "disaggregated_fused"
    wasteful = balanced(32)
    wasteful = make_plan(wasteful.with_(replicas=3 * wasteful.replicas), with_knobs=False)
    assert wasteful.verdict.mode == "colocated_fused"


def test_reference_pair_goes_apart_and_says_why(reference):
    plan = make_plan(workload_of(reference), with_knobs=False)
    assert plan.verdict.mode == "disaggregated_fused"
    assert "35 billion" in plan.verdict.reason and "micro-batches of" in plan.verdict.reason


def test_full_logits_need_more_ranks_than_the_fused_loss(reference):
    work = workload_of(reference)
    assert frontier(work, "colocated_fused") > 8 * frontier(work, "colocated_full")


def test_frontier_is_the_largest_that_fits():
    work = workload_of(load(ROOT / "configs" / f"{PAIRS[0]}.yaml"))
    for mode in MODES[1:]:
        largest = frontier(work, mode)
        assert fits(with_tokens(work, largest), mode)
        assert not fits(with_tokens(work, largest + work.sequence), mode)


def test_the_largest_teacher_fits_and_a_larger_one_does_not(reference):
    work = workload_of(reference)
    for mode in MODES[1:]:
        largest = largest_teacher(work, mode)
        share = (largest - work.teacher_parameters.total) / work.teacher_parameters.layers
        for factor, expected in ((0.97, True), (1.03, False)):
            layers = round(len(work.teacher.layers) * (1 + share * factor))
            deeper = replace(work.teacher, layers=(work.teacher.layers * 20)[:layers])
            assert fits(work.with_(teacher=deeper), mode) is expected


def test_recorded_hidden_states_need_no_teacher_ranks(reference):
    reference.teacher.cache = "somewhere"
    one = as_json(make_plan(workload_of(reference), 16))["modes"]["disaggregated_fused"]
    assert (list(one["ranks"]), one["gpus"], one["bottleneck"], one["stall_share"]) == (["student"], 16, "student", 0.0)


def test_a_remedy_mends():
    work = workload_of(load(ROOT / "configs" / f"{PAIRS[1]}.yaml"))
    remedy = smallest_remedy(work, "colocated_fused")
    assert remedy == "student.ranks=16"
    assert fits(work.with_(student_ranks=16), "colocated_fused")


def test_nothing_fits_is_said_with_the_term_and_the_mend(reference):
    reference.hardware.gpu = "A10G"
    code, text = run_plan(reference)
    assert code == EXIT_NOTHING_FITS
    assert "nothing fits" in text and "short in" in text and "chiefly" in text


def test_text_shows_verdict_modes_memory_and_links(pair):
    code, text = run_plan(pair)
    assert code == 0
    for expected in (
        "take:",
        "colocated, full logits",
        "disaggregated, fused loss",
        "fullest",
        "hidden states",
        "B a token",
        "bands",
    ):
        assert expected in text


@pytest.mark.parametrize("width", [60, 80, 200])
def test_text_stays_within_the_terminal(reference, width):
    console = terminal.console(file=io.StringIO(), width=width)
    plan_command(reference, PlanOptions(), console)
    assert max(map(len, console.file.getvalue().splitlines())) <= width


def test_page_is_self_contained(pair, tmp_path):
    page = tmp_path / "plan.html"
    run_plan(pair, html=str(page), gpus=32)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert not re.search(r"<script|src=|@import|https?://(?!www\.w3)|url\(", text)
    assert text.count("<svg") == 1 and text.count("polyline") == 3
    assert "viewport" in text


def test_explain_prints_formula_numbers_and_source(reference):
    _, text = run_plan(reference, explain="ring")
    assert "ring = K * T * H_t * w" in text and "K = 3" in text and "402,653,184" in text and "source:" in text
    _, names = run_plan(reference, explain="all")
    assert "traffic / hidden states" in names and "constant: reserve" in names
    with pytest.raises(UserError, match="no figure is called 'xyz'"):
        run_plan(reference, explain="xyz")


def test_gpus_are_divided(reference):
    _, text = run_plan(reference, json=True, gpus=16)
    plan = json.loads(text)
    assert plan["splits"]
    assert all(one["student_ranks"] + one["replicas"] * one["ranks_per_replica"] == 16 for one in plan["splits"])
    assert plan["modes"]["colocated_fused"]["ranks"]["colocated"]["count"] == 16


def test_hardware_option_overrides(reference):
    _, text = run_plan(reference, json=True, hardware="aws/p5en.48xlarge")
    assert json.loads(text)["hardware"]["gpu"] == "H200-SXM"
    with pytest.raises(UserError, match="--hardware: 'B300' is no known node or GPU"):
        run_plan(reference, hardware="B300")


def test_simulation_stands_beside_the_closed_form(reference):
    _, text = run_plan(reference, json=True, simulate=True)
    plan = json.loads(text)
    closed = plan["modes"]["disaggregated_fused"]["tokens_per_second"]
    assert plan["simulation"][0]["tokens_per_second"] == pytest.approx(closed, rel=0.05)


def test_price_gives_cost(reference):
    reference.hardware.gpu_hour_price = 2.0
    one = as_json(make_plan(workload_of(reference)))["modes"]["colocated_fused"]
    assert one["cost_per_million_tokens"] == pytest.approx(2 * one["gpu_hours_per_million_tokens"])
    assert one["gpu_hours_per_million_tokens"] == pytest.approx(16 * 1e6 / one["tokens_per_second"] / 3600)


def test_sweep_values():
    assert parse_sweep("a.b=64MiB,256MiB") == ("a.b", ["64MiB", "256MiB"])
    assert parse_sweep("t=4096:65536:x2") == ("t", [4096, 8192, 16384, 32768, 65536])
    assert parse_sweep("t=1:7:+3") == ("t", [1, 4, 7])
    for wrong in ("t", "t=", "t=1:8:x1", "t=0:8:x2", "t=1:8:+0", "t=1:1e9:+1"):
        if wrong == "t=1:1e9:+1":
            continue
        with pytest.raises(UserError, match="--sweep"):
            parse_sweep(wrong)


def test_sweep_plans_each_combination(reference):
    code, text = run_plan(
        reference, json=True, sweep=["train.micro_batch_tokens=8192:32768:x2", "loss.memory_budget=64MiB,256MiB"]
    )
    rows = json.loads(text)["rows"]
    assert code == 0 and len(rows) == 6
    assert [row["values"]["train.micro_batch_tokens"] for row in rows] == [8192, 8192, 16384, 16384, 32768, 32768]
    peaks = [row["modes"]["colocated_full"]["ranks"]["colocated"]["peak_bytes"] for row in rows]
    assert peaks == sorted(peaks)
    with pytest.raises(UserError, match="no key of the config"):
        run_plan(reference, sweep=["student.rank=1,2"])


def test_config_becomes_the_workload(reference):
    work = workload_of(reference)
    assert (work.student_ranks, work.ranks_per_replica, work.parallelism) == (16, 2, "tensor")
    assert (work.micro_batch_tokens, work.sequence, work.student_bytes, work.checkpointing) == (32_768, 8192, 2, True)
    assert (work.packed, work.memory_budget, work.wire_bytes) == (False, 1 << 30, 2.0)
    reference.transport.dtype = "float8"
    assert workload_of(reference).wire_bytes == 1 + 4 / 2048
    reference.student.freeze = ["*embed_tokens*", "lm_head*"]
    frozen = workload_of(reference)
    assert frozen.trained == pytest.approx(1 - 2 * 248_320 * 4096 / 8_953_803_264) and not frozen.head_trained


def test_missing_models_are_named():
    config = Config()
    with pytest.raises(UserError, match="teacher.model: missing"):
        workload_of(config)
    config.teacher.model = "qwen3-8b"
    with pytest.raises(UserError, match="student.model: missing"):
        workload_of(config)


def test_each_kind_of_gpu_has_its_price(reference):
    """A cheap teacher GPU is not an H100, and a price belongs to the GPU that it was given for."""
    reference.hardware.gpu_hour_price = 3.0
    reference.hardware.teacher_gpu, reference.hardware.teacher_gpu_hour_price = "A100-80-SXM", 1.0
    plan = make_plan(workload_of(reference))
    apart, together = plan.modes["disaggregated_fused"], plan.modes["colocated_fused"]
    assert apart.cost.per_hour == 16 * 3.0 + 4 * 1.0
    assert together.cost.per_hour == 16 * 3.0
    page = render_html(plan)
    assert "(student) and 1 (teacher) a GPU-hour" in page
    other = workload_of(reference, "H200-SXM").cluster
    assert (other.student_price, other.teacher_price) == (None, None)
    reference.hardware.teacher_gpu_hour_price = None
    assert make_plan(workload_of(reference)).modes["disaggregated_fused"].cost.per_hour is None


def test_the_verdict_follows_the_price(reference):
    """Teachers so dear that apart costs twice as much: together; so cheap that they cost nothing: apart."""
    reference.hardware.gpu_hour_price, reference.hardware.teacher_gpu = 1.0, "H200-SXM"
    reference.hardware.teacher_gpu_hour_price = 50.0
    dear = make_plan(workload_of(reference)).verdict
    assert dear.mode == "colocated_fused" and "for the same money" in dear.reason
    reference.hardware.teacher_gpu_hour_price = 0.01
    assert make_plan(workload_of(reference)).verdict.mode == "disaggregated_fused"


@pytest.mark.parametrize("gpus", [1, 2, 8, 9, 24])
def test_no_mode_takes_more_gpus_than_there_are(pair, gpus):
    plan = make_plan(workload_of(pair, gpus=gpus), gpus, with_knobs=False)
    for one in plan.modes.values():
        assert one.gpus <= gpus or not one.fits
    if plan.verdict.mode:
        assert plan.modes[plan.verdict.mode].gpus <= gpus


def test_splits_of_thousands_take_no_more_arithmetic_than_of_dozens(pair):
    """Terms that are evaluated, not seconds: ten thousand GPUs cost about as much as sixty-four."""
    from disaggkd_cli.planner import terms
    from disaggkd_cli.planner.split import splits

    work, original, counted = workload_of(pair), terms._compiled, [0]

    def counting(formula):
        counted[0] += 1
        return original(formula)

    terms._compiled = counting
    try:
        splits(work, 64)
        dozens, counted[0] = counted[0], 0
        splits(work, 10_000)
    finally:
        terms._compiled = original
    assert counted[0] < 1.5 * dozens < 300_000


def test_the_bottleneck_is_explained(reference):
    _, text = run_plan(reference, explain="bottleneck")
    assert "tokens per second that the student allows (the bottleneck)" in text
    assert "W * T / t" in text


def test_the_verdict_says_what_to_take_and_what_to_change(reference):
    verdict = make_plan(workload_of(reference)).verdict
    assert "16 × H100-SXM learn, 4 × H100-SXM teach" in verdict.take
    assert verdict.limited_by.startswith("the student's compute")
    assert "student.compile=true would give" in verdict.change
