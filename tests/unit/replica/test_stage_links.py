"""Two neighbouring stages over a real link on loopback: hidden states arrive whole, in order, or are said not to."""

import queue
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from disaggkd_cli.replica.stage_links import Item, StageInput, StageOutput
from disaggkd_cli.transport import Request, open_store
from disaggkd_cli.transport.faults import Faults
from disaggkd_cli.transport.link import STUDENT, TEACHER, form_link
from disaggkd_cli.transport.protocol import StopReason

pytestmark = pytest.mark.timeout(60)
WIDTH = 24


def make_request(number: int, rows: int = 4) -> Request:
    ids = torch.full((2, 9), number, dtype=torch.int32)
    return Request(number, ids, torch.tensor([9, 4, 5], dtype=torch.int32), torch.arange(rows, dtype=torch.int32))


class Neighbours:
    def __init__(self, *, timeout: float = 20.0, dtype=torch.float32, faults: str = "stage 0.0", checksum: bool = True):
        store = open_store("127.0.0.1:0", host_it=True)

        def form(side: int):
            return form_link(store.clone(), "ring", side, name=f"link of side {side}", generation=0, timeout=timeout)

        with ThreadPoolExecutor(2) as pool:
            student, teacher = pool.map(form, (STUDENT, TEACHER))
        self.heard, self.lost = queue.SimpleQueue(), [queue.SimpleQueue(), queue.SimpleQueue()]
        self.output = StageOutput(teacher, checksum=checksum, faults=Faults(faults), lost=self.lost[0].put)
        self.input = StageInput(
            student, width=WIDTH, dtype=dtype, cuda=None, hear=self.heard.put, lost=self.lost[1].put
        )  # fmt: skip
        self.output.start()
        self.input.start()

    def end(self):
        self.output.put(StopReason.LINK_CLOSED)
        assert self.heard.get(timeout=20) is StopReason.LINK_CLOSED
        self.output.close()
        self.input.close()
        assert [lost.empty() for lost in self.lost] == [True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_states_arrive_bit_for_bit_with_their_requests(dtype):
    pair = Neighbours(dtype=dtype)
    sent = [torch.randn(2, 9, WIDTH).to(dtype) for _ in range(12)]
    for number, states in enumerate(sent):
        pair.output.put(Item(number, make_request(number), states))
    for number, states in enumerate(sent):
        item = pair.heard.get(timeout=20)
        assert item.ticket == item.request.request_id == number
        assert torch.equal(item.request.input_ids, make_request(number).input_ids)
        assert torch.equal(item.states.view(torch.uint8), states.view(torch.uint8))
        pair.input.give_back(item.slot)
    pair.end()


def test_answers_and_errors_carry_their_ticket():
    pair = Neighbours()
    states = torch.randn(7, WIDTH)
    pair.output.put(Item(41, None, states))
    pair.output.put(Item(42, error="teacher 0.1: RuntimeError: no memory"))
    pair.output.put(StopReason.TEACHER_LEAVING)
    item = pair.heard.get(timeout=20)
    assert (item.ticket, item.request) == (41, None) and torch.equal(item.states, states)
    assert pair.heard.get(timeout=20) == Item(42, error="teacher 0.1: RuntimeError: no memory")
    assert pair.heard.get(timeout=20) is StopReason.TEACHER_LEAVING
    pair.end()


def test_a_slot_is_used_again_and_grows():
    pair = Neighbours()
    seen = []
    for rows in (3, 3, 50, 3):
        pair.output.put(Item(rows, None, torch.randn(rows, WIDTH)))
        item = pair.heard.get(timeout=20)
        seen.append(item.slot)
        pair.input.give_back(item.slot)
    assert seen[0] is seen[1] and seen[2] is not seen[1] and seen[3] is seen[2]
    pair.end()


def test_a_damaged_payload_costs_its_request_only(monkeypatch):
    monkeypatch.setenv("DISAGGKD_TESTING", "1")
    monkeypatch.setenv("DISAGGKD_FAULT", "stage 0.0.payload:flip@2")
    pair = Neighbours()
    for number in range(3):
        pair.output.put(Item(number, make_request(number), torch.randn(2, 9, WIDTH)))
    errors = [pair.heard.get(timeout=20).error for _ in range(3)]
    assert errors == ["", "hidden states arrived damaged between two stages: its checksum is wrong", ""]
    pair.end()


def test_a_neighbour_of_another_width_is_lost():
    pair = Neighbours()
    pair.output.put(Item(1, make_request(1), torch.randn(2, 9, WIDTH + 1)))
    assert f"states of width {WIDTH + 1}, not {WIDTH}" in str(pair.lost[1].get(timeout=20))


def test_silence_is_no_loss_but_an_end_is():
    pair = Neighbours(timeout=1)
    with pytest.raises(queue.Empty):
        pair.lost[1].get(timeout=3)
    pair.output.drop()
    assert "link of side 0: could not" in str(pair.lost[1].get(timeout=20))
