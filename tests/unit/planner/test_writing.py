"""What the student's writing takes, by hand: Qwen3-1.7B (28 layers, 8 key heads of 128, 151,936 ids) on eight H100."""

import pytest

from disaggkd_cli.config import load
from disaggkd_cli.errors import UserError
from disaggkd_cli.planner.fit import roles_of
from disaggkd_cli.planner.inputs import workload_of
from disaggkd_cli.planner.plan import as_json, make_plan
from disaggkd_cli.planner.simulate import simulate_plan
from disaggkd_cli.planner.timing import colocated_timing, disaggregated_timing
from disaggkd_cli.planner.writing import WRITING, token_time

BASE = """
teacher: {model: qwen3-8b, replicas: 2}
student: {model: qwen3-1.7b, ranks: 8, dtype: bfloat16}
data: {train: data.jsonl, sequence_length: 2048}
train: {micro_batch_sequences: 2, accumulation: 2}
on_policy: {fraction: 0.5, max_new_tokens: 256, prompt_tokens: 32, every: 4}
"""
N = 1_720_574_976
CACHED = 28 * 2 * 8 * 128 * 2  # bytes a token
APART = "disaggregated_fused"
MEMORY = 3.35e12 * 0.8  # bytes a second


@pytest.fixture
def planned(tmp_path):
    (tmp_path / "config.yaml").write_text(BASE)
    return lambda *overrides: workload_of(load(str(tmp_path / "config.yaml"), list(overrides)))


def writing_phase(work, mode=APART, role="student"):
    (phase,) = [one for one in roles_of(work, mode)[role].phases if one.name == "writing"]
    return {one.name: one.value for one in phase.terms}


def test_memory_while_writing(planned):
    terms = writing_phase(planned())
    assert terms["gathered copy of the student"] == 2 * N
    assert terms["cache of keys and values"] == 2 * 288 * CACHED
    assert terms["cache of one layer, being extended"] == 2 * 288 * CACHED / 28
    assert terms["probabilities of the next token"] == 2 * 151_936 * 26
    assert terms["master weights"] == 4 * N / 8 and terms["Adam moments"] == N
    assert not [name for name in terms if "gradients" in name or "activations" in name]
    assert set(writing_phase(planned(), "colocated_fused", "colocated")) >= set(terms) - {"ring"}


def test_one_rank_in_float32_copies_nothing(planned):
    alone = ("student.ranks=1", "student.dtype=float32")
    assert writing_phase(planned(*alone))["gathered copy of the student"] == 0
    assert writing_phase(planned(alone[0]))["gathered copy of the student"] == 2 * N


def test_prompts_that_are_masked_may_fill_what_completions_leave(planned):
    terms = writing_phase(planned("hardware.supervised_share=0.5"))
    assert terms["cache of keys and values"] == 2 * 2048 * CACHED


def test_rows_of_written_sequences_are_what_was_written(planned):
    assert planned().supervised == 0.5 + 0.5 * 256 / 2048
    assert planned("on_policy.fraction=0").supervised == 1


@pytest.mark.parametrize("sequences", [2, 4096])
def test_a_token_more_takes_the_slowest_of_reading_computing_and_starting_kernels(planned, sequences):
    token = token_time(planned(f"train.micro_batch_sequences={sequences}"))
    reading = (2 * N + sequences * 160 * CACHED) / MEMORY
    assert token.value == pytest.approx(28 * 0.5e-3 if sequences == 2 else reading)
    assert (reading < 28 * 0.5e-3) == (sequences == 2)


def test_of_experts_those_are_read_that_a_row_is_sent_to(planned):
    def read(sequences):
        return token_time(planned("student.model=qwen3-30b-a3b", f"train.micro_batch_sequences={sequences}")).values

    work = planned("student.model=qwen3-30b-a3b")
    counted = work.student_parameters
    assert read(1)["N_read"] == pytest.approx(counted.active - counted.embedding)
    assert read(4096)["N_read"] == pytest.approx(counted.total - counted.embedding)


def test_a_window(planned):
    work, without = planned(), disaggregated_timing(planned().with_(writing=None))
    times = disaggregated_timing(work).writing
    # 4 steps of 32 sequences, half of them written: 32 batches of two, four a rank.
    assert times.tokens == 64 * 256
    assert times.written.values["batches"] == 4
    assert times.written.value == pytest.approx(4 * 256 * 28 * 0.5e-3, rel=0.01)
    assert times.weights_bytes.value == 2 * N * 7 / 8
    assert times.weights.value == pytest.approx(2 * N * 7 / 8 / 360e9 + 2 * N / MEMORY)
    own, micro = times.written.value + times.weights.value, 8 * work.micro_batch_tokens / without.tokens_per_second
    assert times.window.value == pytest.approx(own + max(8 * without.student.value, 8 * micro - min(own, 3 * micro)))
    barrier = disaggregated_timing(planned("on_policy.lag=0"))
    assert barrier.writing.window.value == pytest.approx(own + without.latency + 8 * micro)
    assert times.lag_saves == pytest.approx(barrier.writing.window.value - times.window.value) and times.lag_saves > 0
    assert barrier.writing.lag_saves == 0
    assert barrier.tokens_per_second == pytest.approx(4 * work.step_tokens / barrier.writing.window.value)


def test_teachers_on_the_same_ranks_gain_nothing_from_a_lag(planned):
    timing = colocated_timing(planned(), fused=True)
    assert timing.writing.lag_saves == 0 and timing.idle_share == 0
    assert timing.bottleneck == WRITING


def test_the_plan_says_it(planned):
    plan = as_json(make_plan(planned(), with_knobs=False))
    written = plan["modes"][APART]["writing"]
    assert written["steps_per_window"] == 4 and 0 < written["share"] < 1
    assert written["weights_bytes_per_rank"] == 2 * N * 7 / 8
    assert "writing" in plan["modes"][APART]["ranks"]["student"]["phases"]
    assert "recorded_states" not in plan["alternatives"]
    assert "writing" not in as_json(make_plan(planned("on_policy.fraction=0"), with_knobs=False))["modes"][APART]
    with pytest.raises(UserError, match="on_policy=null"):
        simulate_plan(make_plan(planned(), with_knobs=False))
    assert make_plan(planned(), 16, with_knobs=False).splits
