"""FLOPs, traffic, times, rings: by hand, and against simulation."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disaggkd_cli.planner.compute import compute_seconds
from disaggkd_cli.planner.efficiency import KERNELS
from disaggkd_cli.planner.fit import fits
from disaggkd_cli.planner.flops import forward_flops, forward_work, mean_context, student_flops
from disaggkd_cli.planner.hardware import Gpu, load_catalogue
from disaggkd_cli.planner.models import resolve_model
from disaggkd_cli.planner.network import collective_rate, link_rate, replicas_rate
from disaggkd_cli.planner.ring import ring_loss
from disaggkd_cli.planner.simulate import Scenario, simulate, simulate_workload
from disaggkd_cli.planner.split import as_workload, ideal_ratio, smallest_replica, splits
from disaggkd_cli.planner.timing import (
    COLLECTIVES,
    colocated_timing,
    disaggregated_timing,
    recommended_ring_depth,
    student_time,
    teacher_time,
)
from disaggkd_cli.planner.traffic import traffic
from disaggkd_cli.planner.verdict import why_not
from disaggkd_cli.planner.workload import Cluster

from .planner_toys import GPU, toy_model, toy_work


def test_forward_flops_by_hand():
    # Two layers of 592 weights, and 4 q S/2 operations of attention each, q = 8, S = 32.
    assert forward_flops(toy_model(), 32).value == 2 * 1184 + 2 * 4 * 8 * 16


def test_palm_form_of_llama_8b():
    # 2 N without embeddings, and 2 q S a layer.
    shape = resolve_model("llama-3.1-8b", "test")
    matrices = 8_030_261_248 - 2 * 128_256 * 4096 - 4096
    assert forward_flops(shape, 8192).value == 2 * matrices + 32 * 2 * 4096 * 8192


def test_window_limits_the_context():
    assert mean_context(100, None) == 50
    assert mean_context(100, 10) == 10 - 100 / 200
    assert mean_context(8, 10) == 4


def test_student_flops_by_hand():
    full = student_flops(toy_work(), fused=False).value
    forward = 2 * 1184 + 2 * 4 * 8 * 16
    assert full == 3 * forward + 6 * 8 * 32 + 2 * 16 * 32
    assert student_flops(toy_work(checkpointing=True), fused=False).value - full == forward
    half = student_flops(toy_work(supervised=0.5), fused=False).value
    assert full - half == (6 * 8 * 32 + 2 * 16 * 32) / 2


@pytest.mark.parametrize(
    ("name", "hidden", "logits"), [("qwen3-32b", 10_240, 303_872), ("qwen3.5-397b-a17b", 8_192, 496_640)]
)
def test_payload_bytes_of_known_teachers(name, hidden, logits):
    flow = traffic(toy_work(teacher=resolve_model(name, "test")))
    assert (flow.hidden_states.value, flow.logits.value) == (hidden, logits)


def test_a_request_names_tokens_rows_and_documents():
    """Int32 each: every token's id, the supervised rows' places, one length a document."""
    assert traffic(toy_work()).request.value == 4 + 4 + 4 / 32
    assert traffic(toy_work(supervised=0.25, sequence=8)).request.value == 4 + 1 + 4 / 8


def test_collectives_by_hand():
    flow = traffic(toy_work())
    assert flow.fsdp.value == (2 * 1704 + 2 * 1184 + 4 * 1704) * 3 / 4
    assert flow.replicas.value == 0
    copies = traffic(toy_work(replicate=2))
    assert copies.fsdp.value == (2 * 1704 + 2 * 1184 + 4 * 1704) / 2
    assert copies.replicas.value == 2 * 4 * 1704 / 2 / 2
    assert flow.colocated_teacher.value == pytest.approx(2 * toy_work().teacher_parameters.backbone * 3 / 4)
    assert flow.vocabulary_parallel.value == 0
    sharded = traffic(toy_work(vocabulary_parallel=True))
    assert sharded.vocabulary_parallel.value == 3 * 64 * (8 * 2 + 16 * 2) + 2 * 3 * 64 * 8 * 2


def test_collective_rates():
    cluster = Cluster(GPU, GPU, gpus_per_node=8, nic_gb_per_s=50)
    assert collective_rate(cluster, 8, GPU) == pytest.approx(360)
    # Eight rails of 50 GB/s at 74 %.
    assert collective_rate(cluster, 16, GPU) == pytest.approx(296)
    without = Gpu("x", 48, 100, 80, 1, nvlink_gb_per_s=0, pcie_gb_per_s=32)
    assert collective_rate(cluster, 2, without) == pytest.approx(32 * 0.87)


def test_replicas_reduce_over_the_network():
    cluster = Cluster(GPU, GPU, gpus_per_node=8, nic_gb_per_s=50)
    # All replicas in one node; a replica a node: eight shards share eight NICs; four replicas of two ranks in a node.
    assert replicas_rate(cluster, 2, 4, GPU) == pytest.approx(360)
    assert replicas_rate(cluster, 8, 8, GPU) == pytest.approx(37)
    assert replicas_rate(cluster, 64, 2, GPU) == pytest.approx(37)
    assert replicas_rate(cluster, 2, 8, GPU) == pytest.approx(148)


def _slow_network(gbps):
    student, teacher = resolve_model("qwen3-8b", "s"), resolve_model("qwen3-32b", "t")
    gpu = load_catalogue().gpus["H100-SXM"]
    return toy_work(
        teacher=teacher,
        student=student,
        cluster=Cluster(gpu, gpu, 8, gbps / 8),
        student_ranks=64,
        replicas=256,
        replicate=8,
        micro_batch_tokens=4096,
        sequence=4096,
        checkpointing=True,
    )


def test_a_slow_network_between_replicas_is_the_bottleneck():
    """Each rank reduces 7.2 GB over its NIC, for 4,096 tokens of each of 64 ranks."""
    bytes_reduced = 2 * 4 * 8_190_735_360 / 8 * 7 / 8
    for gbps in (12.5, 1.25):
        timing = disaggregated_timing(_slow_network(gbps))
        over_nics = 64 * 4096 / (bytes_reduced / (gbps / 8 * 0.74e9))
        assert timing.bottleneck == COLLECTIVES
        assert 0.85 * over_nics < timing.tokens_per_second <= over_nics
    assert disaggregated_timing(_slow_network(400)).tokens_per_second > 4 * timing.tokens_per_second


def test_gathers_over_a_slow_network_are_the_bottleneck():
    timing = disaggregated_timing(_slow_network(1.25).with_(replicate=1))
    assert timing.bottleneck == COLLECTIVES


def test_links_inside_a_node_are_not_the_networks():
    cards = load_catalogue().gpus["RTX4090"]
    box = toy_work(cluster=Cluster(cards, cards, 4, 2.5 / 8), student_ranks=1)
    assert link_rate(box) == pytest.approx(32 * 0.87)
    assert link_rate(box.with_(student_ranks=4)) == pytest.approx(2.5 / 8 * 0.7)
    other = load_catalogue().gpus["A6000"]
    apart = box.with_(cluster=Cluster(cards, other, 4, 2.5 / 8))
    assert link_rate(apart) == pytest.approx(2.5 / 8 * 0.7)


def test_without_a_network_all_is_on_one_node():
    gpu = load_catalogue().gpus["RTX4090"]
    box = toy_work(cluster=Cluster(gpu, gpu, 2, 0.0), student_ranks=1)
    assert fits(box, "disaggregated_fused")
    larger = box.with_(student_ranks=2)
    assert not fits(larger, "disaggregated_fused") and fits(larger, "colocated_fused")
    assert "hardware.nic_gbps=0" in why_not(larger, "disaggregated_fused")


@pytest.mark.parametrize(("parallelism", "senders"), [("fsdp", 8), ("tensor", 2), ("pipeline", 2)])
def test_only_ranks_that_send_use_their_network(parallelism, senders):
    work = toy_work(replicas=2, ranks_per_replica=4, parallelism=parallelism, student_ranks=16)
    row = traffic(work).hidden_states.value
    assert disaggregated_timing(work).rates["link"] == pytest.approx(senders * link_rate(work) * 1e9 / row)


def test_teacher_time_by_hand():
    """Matrix products, attention and memory traffic, each at its own rate, by hand."""
    work = toy_work(micro_batch_tokens=32 * 10**6)
    hopper, forward = KERNELS.of("hopper"), forward_work(work.teacher, 32)
    seconds = forward.dense / (800e12 * hopper.matmul) + forward.attention / (800e12 * hopper.attention)
    seconds += hopper.pointwise * forward.saved / (3e12 * 0.8)
    assert teacher_time(work).value == pytest.approx(32e6 * seconds)


def test_layouts_of_a_teacher_have_their_price():
    one = toy_work(teacher=resolve_model("llama-3.1-405b", "t"), micro_batch_tokens=8192, sequence=8192)
    gpu = load_catalogue().gpus["H100-SXM"]
    one = one.with_(cluster=Cluster(gpu, gpu, 8, 50.0))
    alone = teacher_time(one).value
    tensor = teacher_time(one.with_(ranks_per_replica=16, parallelism="tensor")).value
    # Two all-reduces in each of 126 layers, over all NICs of two nodes: 0.43 s.
    assert tensor - alone / 16 == pytest.approx(0.43, abs=0.005)
    inside = teacher_time(one.with_(ranks_per_replica=8, parallelism="tensor")).value
    assert inside - alone / 8 == pytest.approx(2 * 126 * 2 * 8192 * 16384 * 2 * 7 / 8 / 360e9, rel=1e-3)
    pipeline = one.with_(ranks_per_replica=16, parallelism="pipeline")
    assert teacher_time(pipeline).value == pytest.approx(alone * 8 / 126)
    assert disaggregated_timing(pipeline).latency > 16 * alone * 8 / 126


def test_no_plan_passes_the_measured_matrix_rate():
    """Nothing computes faster than the largest matrix product that was ever measured on the GPU."""
    for gpu in load_catalogue().gpus.values():
        for name in ("llama-3.1-405b", "qwen3-0.6b", "qwen3.5-397b-a17b", "deepseek-v3"):
            shape = resolve_model(name, "t")
            for passes in (1, 3):
                for sequence in (512, 262_144):
                    forward = forward_work(shape, sequence)
                    term = compute_seconds("token", gpu, forward, sequence=sequence, passes=passes, compiled=True)
                    assert passes * forward.flops / term.value <= gpu.matmul_tflops * 1e12, (gpu.name, name)


def test_attention_costs_more_than_matrix_products():
    shape = resolve_model("llama-3.1-8b", "t")
    gpu = load_catalogue().gpus["H100-SXM"]

    def rate(sequence):
        forward = forward_work(shape, sequence)
        return forward.flops / compute_seconds("token", gpu, forward, sequence=sequence).value

    assert rate(4096) > 1.3 * rate(262_144)


def test_colocated_takes_turns_and_disaggregated_overlaps():
    work = toy_work(micro_batch_tokens=32 * 10**4)
    together = colocated_timing(work, fused=True)
    assert together.tokens_per_second == pytest.approx(4 * 32e4 / (together.teacher.value + together.student.value))
    apart = disaggregated_timing(work)
    assert apart.tokens_per_second <= min(apart.rates.values())
    assert apart.bottleneck == min(apart.rates, key=apart.rates.get)


def test_one_slot_does_not_overlap():
    work = toy_work(micro_batch_tokens=32 * 10**4, ring_depth=1, replicas=4)
    timing = disaggregated_timing(work)
    assert timing.bottleneck.startswith("ring")
    assert timing.tokens_per_second < disaggregated_timing(work.with_(ring_depth=3)).tokens_per_second


@given(jitter=st.floats(0.01, 0.5), slots=st.floats(1, 20), slack=st.floats(0, 1), more=st.floats(0.01, 5))
@settings(max_examples=200, deadline=None)
def test_ring_loss_is_a_share_and_falls_with_slots_and_slack(jitter, slots, slack, more):
    loss = ring_loss(jitter, slots, slack)
    assert 0 <= loss <= 0.5
    assert ring_loss(jitter, slots + more, slack) <= loss + 0.02
    assert ring_loss(jitter, slots, slack + more) <= loss + 1e-9
    assert ring_loss(0.0, slots, slack) == 0


@pytest.mark.parametrize("jitter", [0.1, 0.2, 0.3])
@pytest.mark.parametrize("slack", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("depth", [2, 3, 4, 6])
def test_closed_form_of_the_ring_against_simulation(jitter, slack, depth):
    simulated = simulate(1, 1, depth, 1.0, 1 / (1 + slack), jitter=jitter, steps=20_000).tokens_per_second
    assert 1 - ring_loss(jitter, depth - 1, slack) == pytest.approx(simulated, abs=0.02 if depth == 2 else 0.012)


@pytest.mark.parametrize(
    ("ranks", "replicas", "depth"), [(8, 2, 3), (8, 8, 3), (8, 32, 8), (4, 1, 2), (64, 40, 6), (1000, 300, 4)]
)
def test_rate_of_pools_against_simulation(ranks, replicas, depth):
    work = toy_work(
        teacher=resolve_model("qwen3-32b", "t"),
        student=resolve_model("qwen3-1.7b", "s"),
        student_ranks=ranks,
        replicas=replicas,
        ring_depth=depth,
        micro_batch_tokens=8192,
        sequence=4096,
    )
    simulated = simulate_workload(work, steps=150 if ranks > 500 else 300).tokens_per_second
    assert disaggregated_timing(work).tokens_per_second == pytest.approx(simulated, rel=0.05)


def test_simulation_without_jitter_is_the_slower_side():
    assert simulate(2, 2, 3, 1.0, 0.5).tokens_per_second == pytest.approx(2.0)
    assert simulate(2, 1, 3, 0.2, 0.5).tokens_per_second == pytest.approx(2.0, rel=0.02)


def test_slow_and_failing_teachers_cost_throughput_but_no_request():
    usual = simulate(4, 4, 3, 1.0, 0.95, jitter=0.05, steps=500)
    slow = simulate(
        4, 4, 3, 1.0, 0.95, jitter=0.05, steps=500, scenario=Scenario("slow", slow_share=0.5, slow_factor=3.0)
    )
    failing = simulate(
        4,
        4,
        3,
        1.0,
        0.95,
        jitter=0.05,
        steps=500,
        scenario=Scenario("failing", failures_per_hour=20, recovery_seconds=60),
    )
    assert slow.tokens_per_second < 0.8 * usual.tokens_per_second
    assert failing.failures > 0 and failing.requests_resent == failing.failures
    assert failing.tokens_per_second < usual.tokens_per_second


def test_simulation_repeats_with_its_seed():
    assert simulate(2, 2, 3, 1.0, 1.0, jitter=0.2, seed=5) == simulate(2, 2, 3, 1.0, 1.0, jitter=0.2, seed=5)


@given(scale=st.floats(0.1, 10))
@settings(max_examples=20, deadline=None)
def test_ratio_does_not_depend_on_the_speed_of_the_gpus(scale):
    work = toy_work(micro_batch_tokens=32 * 10**7)
    gpu = Gpu("x", 80, 1000 * scale, 800 * scale, 3 * scale, 450 * scale, 64 * scale)
    scaled = work.with_(cluster=Cluster(gpu, gpu, 8, 50.0 * scale))
    assert ideal_ratio(scaled) == pytest.approx(ideal_ratio(work), rel=1e-6)


def _dense_pair(**changes):
    return toy_work(
        teacher=resolve_model("qwen3-32b", "t"),
        student=resolve_model("qwen3-1.7b", "s"),
        micro_batch_tokens=8192,
        sequence=4096,
        checkpointing=True,
        **changes,
    )


def test_splits_stay_within_the_limit_and_put_the_best_first():
    found = splits(_dense_pair(), 16)
    assert found and all(one.gpus <= 16 for one in found)
    assert found[0].gpus == 16
    assert found[0].tokens_per_second >= 0.99 * max(one.tokens_per_second for one in found)
    # A teacher of 32 billion parameters needs about four GPUs for each of the student's, so most of them teach.
    assert found[0].teacher_ranks >= 10
    assert smallest_replica(_dense_pair()) == 1


@pytest.mark.parametrize("gpus", [2, 3, 8, 24])
def test_no_split_of_every_kind_is_faster_than_the_one_found(gpus):
    """All numbers of replicas and student ranks of the layout that was taken, one by one."""
    work = _dense_pair()
    best = splits(work, gpus)[0]
    chosen = as_workload(work, best)
    fastest = 0.0
    for replicas in range(1, gpus):
        for students in range(1, gpus - replicas * best.ranks_per_replica + 1):
            other = chosen.with_(student_ranks=students, replicas=replicas)
            other = other.with_(ring_depth=max(work.ring_depth, recommended_ring_depth(other)))
            if fits(other, "disaggregated_fused"):
                fastest = max(fastest, disaggregated_timing(other).tokens_per_second)
    assert best.tokens_per_second >= 0.98 * fastest


def test_a_split_takes_what_memory_allows_to_go_faster():
    """Checkpointing is left out where there is room, though the config asks for it, and the tokens of a step stay."""
    best = splits(_dense_pair(), 16)[0]
    assert not best.checkpointing
    assert best.micro_batch_sequences * best.accumulation == 2
    tight = Gpu("small", 20, 1000, 800, 3, 450, 64, "hopper")
    roomy = Gpu("roomy", 140, 1000, 800, 3, 450, 64, "hopper")
    held = splits(_dense_pair(cluster=Cluster(tight, roomy, 8, 50.0)), 16)
    assert held and held[0].checkpointing


def test_splits_follow_prices():
    """Teachers that cost next to nothing: the cheapest split has more of them than the one for equal prices."""
    cheap = Cluster(GPU, GPU, 8, 50.0, student_price=10.0, teacher_price=0.1)
    equal = Cluster(GPU, GPU, 8, 50.0, student_price=1.0, teacher_price=1.0)
    few, many = (splits(_dense_pair(cluster=cluster), 32)[0] for cluster in (cheap, equal))
    assert few.cost_per_hour == pytest.approx(few.student_ranks * 10 + few.teacher_ranks * 0.1)
    per_token = few.cost_per_hour / few.tokens_per_second
    dear = many.student_ranks * 10 + many.teacher_ranks * 0.1
    assert per_token <= dear / many.tokens_per_second * 1.001


def test_more_gpus_are_never_slower():
    speeds = [splits(_dense_pair(), gpus)[0].tokens_per_second for gpus in range(2, 40, 4)]
    assert all(later >= 0.98 * earlier for earlier, later in itertools.pairwise(speeds))


def test_recommended_depth_grows_with_the_teachers_in_flight():
    few, many = (toy_work(replicas=count, micro_batch_tokens=32 * 10**5) for count in (1, 64))
    assert 2 <= recommended_ring_depth(few) <= recommended_ring_depth(many)


def test_student_time_takes_the_longer_of_products_and_collectives():
    slow_network = toy_work(student_ranks=64, cluster=Cluster(GPU, GPU, 1, 1e-6))
    assert student_time(slow_network).value > 1e3 * student_time(toy_work(student_ranks=64)).value


def test_one_slow_teacher_of_one_is_slow():
    slow = Scenario("slow", slow_share=0.1, slow_factor=2.0)
    whole, half = (simulate(4, 1, 3, 1.0, 0.5, scenario=one).tokens_per_second for one in (Scenario("none"), slow))
    assert half < 0.6 * whole


def test_communicators_of_links_are_named_where_they_take_the_memory():
    gpu = load_catalogue().gpus["H100-SXM"]
    work = toy_work(
        teacher=resolve_model("qwen3.5-35b-a3b", "t"),
        student=resolve_model("qwen3.5-9b", "s"),
        cluster=Cluster(gpu, gpu, 8, 50.0),
        student_ranks=512,
        micro_batch_tokens=8192,
        sequence=8192,
        checkpointing=True,
    )
    reason = why_not(work, "disaggregated_fused")
    assert "communicators of 512 links (30.72 GiB)" in reason
    assert "transport.backend=gloo would make it fit" in reason


def test_eager_attention_takes_its_time():
    """Scores pass through memory: at 16,384 tokens that is most of a forward; asking for it counts for any model."""
    work = toy_work(teacher=resolve_model("qwen3-8b", "t"), sequence=16_384, micro_batch_tokens=16_384)
    fused = teacher_time(work).value
    eager = teacher_time(work.with_(teacher_attention="eager")).value
    scores = 16_384 * 26 * 36 * 32 * 16_384 / (3e12 * 0.8)
    assert eager - fused > 0.9 * scores
    sinks = toy_work(teacher=resolve_model("gpt-oss-20b", "t"), sequence=16_384, micro_batch_tokens=16_384)
    assert teacher_time(sinks).value == teacher_time(sinks.with_(teacher_attention="eager")).value
