"""Memory by phase: each term by hand, and what must hold for every run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disaggkd_cli.losses.divergences import DIVERGENCES, divergence_named
from disaggkd_cli.planner import memory
from disaggkd_cli.planner.published import ROWS, predict_gib
from disaggkd_cli.planner.terms import total

from .planner_toys import toy_model, toy_work

N = 1704
LAYER = 592
ROOT = 256 + 8 + 256


def terms_of(rank: memory.RankMemory, phase: str) -> dict[str, float]:
    found = next(one for one in rank.phases if one.name == phase)
    return {one.name: one.value for one in found.terms}


def test_student_loss_phase_by_hand():
    found = terms_of(memory.student_rank(toy_work()), "loss")
    saved = 2 * (2 * (8 * 8 + 4) + 2 * (2 * 8 + 2 * 4) + 4 * 2 + 4 * 2 * 16)
    assert found.pop("fused-loss scratch") <= 256 << 20
    assert found == {
        "master weights": 4 * N / 4,
        "Adam moments": 8 * N / 4,
        # A mask [S, S] is kept where rows are packed; these are not.
        "saved activations": 64 * saved,
        "root unit, whole": 2 * ROOT,
        "last all-gather": 2 * LAYER,
        "final norm": 64 * (8 * 8 + 4),
        "supervised rows": 64 * 8 * 2,
        "dH": 64 * 8 * 2,
        "dW of the head": 4 * 32 * 8,
        "ring": 3 * 64 * 16 * 2,
        "teacher head": 2 * 32 * 16,
    }


SAVED = 2 * (8 * 8 + 4) + 2 * (2 * 8 + 2 * 4) + 4 * 2 + 4 * 2 * 16
"""Bytes per token of one toy layer in bfloat16."""


def test_backward_phases_by_hand():
    rank = memory.student_rank(toy_work())
    last = terms_of(rank, "last layer backward")
    # The layer's weights and the next one's all-gather; gradients of the MLP's product, of the hidden states, of one
    # matrix.
    assert last["layer weights, whole"] == 2 * 2 * LAYER
    assert last["one layer's activations"] == 64 * 2 * 2 * (16 + 8)
    assert last["head gradient, whole"] == 2 * 32 * 8
    middle = terms_of(rank, "layer backward")
    assert middle["layer reduction"] == 4 * LAYER
    assert middle["one layer's activations"] == last["one layer's activations"]
    assert middle["saved activations"] == last["saved activations"] - 64 * SAVED
    first = terms_of(rank, "first layer backward")
    # Those of the first layer and of the root unit are still to come.
    assert first["sharded gradients"] == 4 * (len(toy_model().layers) - 1) * LAYER / 4
    second = terms_of(rank, "second layer backward")
    assert second["sharded gradients"] == 4 * (len(toy_model().layers) - 2) * LAYER / 4
    assert second["saved activations"] == 64 * SAVED
    assert first["layer weights, whole"] == 2 * LAYER
    assert first["one layer's activations"] == 64 * (SAVED + 2 * 2 * (16 + 8))
    assert terms_of(rank, "embedding backward")["embedding and head gradients"] == 2 * 2 * 32 * 8
    assert terms_of(rank, "root reduce")["root reduction"] == 6 * ROOT
    assert total(rank.phases[-1].terms) == 16 * N / 4 + 3 * 64 * 16 * 2 + 2 * 32 * 16


def test_head_gradient_is_cast_beside_its_float32_form():
    found = terms_of(memory.student_rank(toy_work()), "loss backward")
    assert (found["dW of the head"], found["head gradient, whole"]) == (4 * 32 * 8, 2 * 32 * 8)
    assert "fused-loss scratch" not in found
    float32 = memory.student_rank(toy_work(student_bytes=4))
    assert "loss backward" not in {phase.name for phase in float32.phases}


def test_a_tied_weight_has_two_gradients_and_their_sum():
    rank = memory.student_rank(toy_work(student=toy_model(2, tied=True)))
    assert terms_of(rank, "embedding backward")["embedding and head gradients"] == 3 * 2 * 32 * 8


def test_a_large_layer_ends_with_its_gradients_instead_of_its_activations():
    work = toy_work(micro_batch_tokens=1, sequence=1)
    assert terms_of(memory.student_rank(work), "first layer backward")["one layer's activations"] == 2 * LAYER


def test_full_logits_by_hand():
    rank = memory.student_rank(toy_work(), fused=False)
    assert terms_of(rank, "loss")["full logits"] == (29 + 2) * 64 * 32  # bfloat16 compute
    tempered = replace(toy_work(student_bytes=4), temperature=2.0)
    assert terms_of(memory.student_rank(tempered, fused=False), "loss")["full logits"] == (29 + 8) * 64 * 32
    assert "dW of the head" not in terms_of(rank, "loss")


def test_checkpointing_keeps_inputs_and_recomputes_one_layer():
    found = terms_of(memory.student_rank(toy_work(checkpointing=True)), "last layer backward")
    assert found["saved activations"] == 64 * 2 * 8 * 2
    assert found["one layer's activations"] == 64 * (SAVED + 2 * 2 * (16 + 8))


def test_accumulation_keeps_the_shard_of_the_gradients():
    assert "sharded gradients" not in terms_of(memory.student_rank(toy_work()), "loss")
    assert terms_of(memory.student_rank(toy_work(accumulation=2)), "loss")["sharded gradients"] == 4 * N / 4


def test_one_float32_rank_holds_copies_too():
    work = toy_work(student_ranks=1, student_bytes=4)
    found = terms_of(memory.student_rank(work), "last layer backward")
    assert found["root unit, whole"] == 4 * work.student_parameters.root
    assert found["layer weights, whole"] == 2 * 4 * work.student_parameters.largest_layer
    layer = terms_of(memory.student_rank(work), "layer backward")
    assert layer["layer reduction"] == 4 * work.student_parameters.largest_layer


def test_fsdp_copies_on_one_float32_rank():
    """What the planner counts there is what FSDP2 does: the weight that a forward sees is not its shard's memory."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    seen = []
    layer = torch.nn.Linear(8, 8, bias=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(layer, mesh=DeviceMesh.from_group(dist.group.WORLD, "cpu"))
        layer.register_forward_hook(lambda module, *_: seen.append(module.weight.data_ptr()))
        layer(torch.ones(1, 8))
        layer.reshard()
        assert seen and seen[0] != layer.weight.to_local().data_ptr()
    finally:
        dist.destroy_process_group()


def test_teacher_rank_by_hand():
    teacher = 32 * 16 + 3 * (2 * 16 * 8 + 2 * 16 * 4 + 3 * 16 * 16 + 32) + 16
    alone = {one.name: one.value for one in memory.teacher_rank(toy_work()).phases[0].terms}
    assert alone == {
        "teacher weights": 2 * teacher,
        "teacher activations": 64 * max(2 * (3 * 16 + 3 * 8 + 2 * 4), 2 * (4 * 16 + 3 * 16), 12 * 16),
        "send buffers": 8 * 64 * 16 * 2,
    }
    lonely = memory.teacher_rank(toy_work(student_ranks=1))
    assert {one.name: one.value for one in lonely.phases[0].terms}["send buffers"] == 2 * 64 * 16 * 2
    popular = memory.teacher_rank(toy_work(student_ranks=16))
    assert {one.name: one.value for one in popular.phases[0].terms}["send buffers"] == 8 * 64 * 16 * 2, "MOST_REPLIES"
    sharded = {one.name: one.value for one in memory.teacher_rank(toy_work(ranks_per_replica=4)).phases[0].terms}
    assert sharded["teacher weights"] == 2 * teacher / 4
    assert sharded["teacher layers gathered"] == 3 * 2 * (2 * 16 * 8 + 2 * 16 * 4 + 3 * 16 * 16 + 32)
    tensor = memory.teacher_rank(toy_work(ranks_per_replica=4, parallelism="tensor"))
    assert "teacher layers gathered" not in {one.name for one in tensor.phases[0].terms}


def test_colocated_rank_holds_both():
    work = toy_work()
    rank = memory.colocated_rank(work, fused=True)
    assert rank.phases[0].name == "teacher forward"
    loss = terms_of(rank, "loss")
    assert loss["teacher weights"] == pytest.approx(2 * work.teacher_parameters.backbone / 4)
    assert "ring" not in loss
    assert loss["teacher hidden states"] == 64 * 16 * 2


def test_shared_heads_by_hand():
    """Four ranks keep 8 of 32 ids each and see the rows of all; the root unit keeps embedding and norm."""
    cut = toy_work(vocabulary_parallel=True)
    found = terms_of(memory.student_rank(cut), "loss")
    assert found["teacher head"] == 2 * 8 * 16
    assert found["dW of the head"] == 4 * 8 * 8
    assert found["head shard, in 16 bits"] == 2 * 8 * 8
    assert found["rows of all ranks"] == 4 * 64 * (8 * 2 + 16 * 2)
    assert found["dH"] == 4 * 64 * 8 * 2
    assert found["root unit, whole"] == 2 * (256 + 8)
    middle = terms_of(memory.student_rank(cut), "layer backward")
    assert middle["head gradient, this rank's shard"] == 4 * 8 * 8
    assert "head gradient, this rank's shard" not in terms_of(memory.student_rank(cut), "first layer backward")
    assert terms_of(memory.student_rank(cut), "root reduce")["root reduction"] == 6 * (256 + 8)
    assert "head shard, in 16 bits" not in terms_of(memory.student_rank(cut.with_(student_bytes=4)), "loss")


def test_shared_heads_of_different_sizes_and_a_tied_weight():
    extra = toy_work(vocabulary_parallel=True, teacher=toy_model(3, hidden=16, vocabulary=37, name="teacher"))
    assert terms_of(memory.student_rank(extra), "loss")["teacher head"] == 2 * (37 - 3 * 8) * 16
    tied = toy_work(vocabulary_parallel=True, student=toy_model(2, tied=True))
    assert terms_of(memory.student_rank(tied), "loss")["root unit, whole"] == 2 * 8
    found = terms_of(memory.student_rank(tied), "embedding backward")
    assert found["embedding and head gradients"] == 8 * 8 * 8 + 4 * 64 * 8 * (2 + 4)


def test_copies_share_heads_and_teacher_within_a_copy():
    work = toy_work(replicate=2, vocabulary_parallel=True)
    assert terms_of(memory.student_rank(work), "loss")["teacher head"] == 2 * 16 * 16
    colocated = terms_of(memory.colocated_rank(work, fused=True), "loss")
    assert colocated["teacher weights"] == pytest.approx(2 * work.teacher_parameters.backbone / 2)
    assert terms_of(memory.colocated_rank(work, fused=False), "loss")["teacher head"] == 2 * 32 * 16
    alone = toy_work(replicate=4, vocabulary_parallel=True)
    assert terms_of(memory.student_rank(alone), "loss")["teacher head"] == 2 * 32 * 16


def test_auto_shares_heads_where_rows_are_few():
    few = toy_work(vocabulary_parallel="auto", micro_batch_tokens=8, student=toy_model(2, vocabulary=3200))
    assert few.vocabulary_shards == 4
    assert few.with_(micro_batch_tokens=8000).vocabulary_shards == 1


def test_freezing_all_leaves_one_phase():
    rank = memory.student_rank(toy_work(trained=0.0, head_trained=False))
    assert [phase.name for phase in rank.phases] == ["loss"]


def test_float8_on_the_wire_shrinks_the_ring():
    wide, narrow = (memory.student_rank(toy_work(wire_bytes=width)) for width in (2.0, 1 + 4 / 16))
    assert terms_of(narrow, "loss")["ring"] / terms_of(wide, "loss")["ring"] == 0.625


KINDS = {
    "student": memory.student_rank,
    "teacher": memory.teacher_rank,
    "colocated": lambda work: memory.colocated_rank(work, fused=True),
    "colocated full": lambda work: memory.colocated_rank(work, fused=False),
}


@pytest.mark.parametrize("kind", KINDS)
@given(sequences=st.integers(1, 64), more=st.integers(1, 64))
@settings(max_examples=25, deadline=None)
def test_memory_never_falls_with_tokens(kind, sequences, more):
    few, many = (KINDS[kind](toy_work(micro_batch_tokens=32 * count)) for count in (sequences, sequences + more))
    # The loss's scratch may shrink when another tile fits better; it never exceeds its budget.
    assert many.peak_bytes >= few.peak_bytes - (256 << 20 if "full" not in kind else 0)
    for one, other in zip(few.phases, many.phases, strict=True):
        without = [total([part for part in phase.terms if part.name != "fused-loss scratch"]) for phase in (one, other)]
        assert without[1] >= without[0]


@pytest.mark.parametrize("kind", ["student", "colocated", "colocated full"])
@given(ranks=st.integers(1, 64), more=st.integers(1, 64))
@settings(max_examples=25, deadline=None)
def test_memory_never_rises_with_ranks(kind, ranks, more):
    # One rank keeps no flat buffer of a gather, so the comparison starts at two.
    few, many = (KINDS[kind](toy_work(student_ranks=1 + count)) for count in (ranks, ranks + more))
    assert many.peak_bytes <= few.peak_bytes + 1e-6


@given(depth=st.integers(1, 16))
@settings(max_examples=10, deadline=None)
def test_one_more_slot_costs_one_payload(depth):
    shallow, deep = (memory.student_rank(toy_work(ring_depth=count)) for count in (depth, depth + 1))
    assert deep.peak_bytes - shallow.peak_bytes == 64 * 16 * 2


@pytest.mark.parametrize("kind", KINDS)
def test_phases_are_affine_in_tokens(kind):
    sizes = [KINDS[kind](toy_work(micro_batch_tokens=32 * count, asked_budget=64 << 20)) for count in (10, 20, 30)]
    for phases in zip(*(rank.phases for rank in sizes), strict=True):
        values = [sum(part.value for part in phase.terms if part.name != "fused-loss scratch") for phase in phases]
        assert values[2] - values[1] == pytest.approx(values[1] - values[0], rel=1e-9)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_published_rows_within_their_bands(row):
    assert predict_gib(row) == pytest.approx(row.measured_gib, rel=row.band)


def test_full_logit_bytes_are_those_of_our_reference_loss():
    """Peak of the reference loss by CPU allocations: the slope over rows and vocabulary."""
    from .planner_loss_peak import peak_of_reference

    for divergence in DIVERGENCES:
        expected = divergence_named(divergence).full_logits_bytes
        sizes = [(128, 1024), (256, 1024), (128, 2048), (256, 2048)]
        a, b, c, d = (peak_of_reference(divergence, rows, vocabulary) for rows, vocabulary in sizes)
        assert ((d - c) - (b - a)) / (128 * 1024) == pytest.approx(expected, abs=0.1), divergence


@pytest.mark.parametrize(("dtype_bytes", "divergence"), [(4, "forward_kl"), (2, "forward_kl"), (4, "jsd")])
def test_fused_loss_stays_within_its_prediction(dtype_bytes, divergence):
    """Peak of the real fused loss, forward and backward, beside its inputs: close below scratch, dH, dW and its
    cast."""
    from .planner_loss_peak import peak_of_fused

    rows, vocabulary, width, budget = 512, 8192, 64, 8 << 20
    from disaggkd_cli.planner.loss import fused

    work = fused(
        rows,
        vocabulary,
        vocabulary,
        width,
        width,
        divergence,
        budget,
        dtype_bytes,
        dtype_bytes,
        device="cpu",
        compiled=False,
    )
    gradients = dtype_bytes * rows * width + 4 * vocabulary * width
    cast = dtype_bytes * vocabulary * width if dtype_bytes == 2 else 0
    predicted = gradients + max(work.scratch.value, cast)
    measured = peak_of_fused(divergence, rows, vocabulary, width, budget, dtype_bytes)
    assert measured <= predicted * 1.01
    assert measured >= predicted * 0.5


def test_a_deeper_model_costs_more():
    shallow, deep = (memory.student_rank(toy_work(student=toy_model(layers))) for layers in (2, 4))
    assert deep.peak_bytes > shallow.peak_bytes
