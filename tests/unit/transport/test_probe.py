"""Teachers of the same weights that compute other bits are told apart."""

import pytest
import torch
import torch.distributed as dist

from disaggkd_cli.models import backbone_of, requested_states
from disaggkd_cli.transport import Identity, IncompatiblePeer
from disaggkd_cli.transport.probe import compare_probes, probe_of, probe_request, refuse_other_bits
from disaggkd_cli.transport.protocol import request_body
from tests.support.models import VOCABULARY, tiny_model
from tests.unit.transport.test_exchange import exchange, ids_of, make_request, ring_over, wait_until  # noqa: F401


def forward_of(model):
    backbone = backbone_of(model)
    return lambda request: requested_states(
        backbone, request.input_ids, request.document_lengths, request.rows, torch.device("cpu")
    )


@pytest.mark.parametrize("vocabulary", [5, 16, 248_320])
def test_the_probe_is_a_sound_request_for_any_vocabulary(vocabulary):
    request = probe_request(vocabulary)
    request_body(request)
    assert 0 <= int(request.input_ids.min()) and int(request.input_ids.max()) < vocabulary


def test_a_probe_repeats_itself_and_tells_dtypes_apart():
    model = tiny_model("llama")
    first = probe_of(forward_of(model), VOCABULARY, "float32")
    assert first == probe_of(forward_of(model), VOCABULARY, "float32") and len(first) == 16
    assert first != probe_of(forward_of(model.to(torch.bfloat16)), VOCABULARY, "float32")


def test_a_probe_tells_one_last_bit_of_one_value():
    def forward(request, last=False):
        states = torch.ones(request.num_rows, 4)
        if last:
            states[-1, -1] = torch.nextafter(states[-1, -1], torch.tensor(2.0))
        return states

    whole = probe_of(forward, 9, "float32")
    assert whole != probe_of(lambda request: forward(request, last=True), 9, "float32")


def test_the_first_teacher_is_what_others_are_held_against():
    store = dist.HashStore()
    assert compare_probes(store, Identity("teacher 9")) == "", "who says nothing is not compared, and is no measure"
    refuse_other_bits(store, Identity("teacher 0", probe="a1", numerics="bfloat16, 2 threads"))
    refuse_other_bits(store, Identity("teacher 1", probe="a1", numerics="bfloat16, 4 threads"))
    with pytest.raises(IncompatiblePeer, match=r"teacher 2 \(float32\) makes b2.*teacher 0 \(bfloat16, 2 threads\) a1"):
        refuse_other_bits(store, Identity("teacher 2", probe="b2", numerics="float32"))
    refuse_other_bits(store, Identity("teacher 0", probe="a1"))


def test_a_teacher_of_other_bits_is_refused(exchange):  # noqa: F811
    exchange.teacher("teacher 0", probe="aa")
    pool = exchange.pool()
    pool.wait_for_teacher()
    exchange.teacher("teacher 1", probe="bb")
    exchange.teacher("teacher 2", probe="aa")
    wait_until(lambda: pool.teachers == 2)
    wait_until(lambda: any("refused teacher 1: same weights, other bits" in line for line in pool.events))
    assert ids_of(ring_over(pool, [make_request(n) for n in range(4)])) == list(range(4))


def test_it_may_serve_where_that_is_allowed_and_said(exchange):  # noqa: F811
    exchange.teacher("teacher 0", probe="aa")
    pool = exchange.pool(mixed=True)
    pool.wait_for_teacher()
    exchange.teacher("teacher 1", probe="bb")
    wait_until(lambda: pool.teachers == 2)
    assert any("not reproducible bit for bit" in line for line in pool.events)
    assert [teacher["other_bits"] for teacher in pool.stats().values()] == [False, True]
