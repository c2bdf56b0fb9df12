"""Headers run ahead of payloads, and what is posted ahead never stands in the way of hanging up."""

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from disaggkd_cli.transport import Identity, LinkLost, ProtocolError
from disaggkd_cli.transport.link import STUDENT, TEACHER, form_link
from disaggkd_cli.transport.protocol import Header, Kind
from disaggkd_cli.transport.slots import make_slots
from disaggkd_cli.transport.teacher_link import Reply, TeacherLink

pytestmark = pytest.mark.timeout(60)


def form_both(timeout=10, generations=(1, 1)):
    store, links = dist.HashStore(), {}

    def form(side):
        links[side] = form_link(store, "k", side, name=f"side {side}", generation=generations[side], timeout=timeout)

    threads = [threading.Thread(target=form, args=(side,)) for side in (STUDENT, TEACHER)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return links[STUDENT], links[TEACHER]


def send_in_background(call, *arguments):
    """Sends are rendezvous: they need a thread beside the one that receives."""
    thread = threading.Thread(target=call, args=arguments, daemon=True)
    thread.start()
    return thread


def test_the_next_header_passes_a_payload_that_nobody_receives_yet():
    student, teacher = form_both()
    payloads = [torch.full((5000,), number, dtype=torch.uint8) for number in (1, 2)]
    (slot,) = make_slots(1, 5000)
    sending = send_in_background(teacher.send_header, Header(Kind.READY, body_bytes=5000))
    assert student.receive_header().kind is Kind.READY
    sending.join()
    first = teacher.payloads.start(teacher.payloads.stage(payloads[0]))
    teacher.send_header(Header(Kind.READY, ticket=7, body_bytes=5000))  # would wait in vain behind the payload
    student.payloads.receive(slot, 5000)
    first.wait()
    assert torch.equal(slot.buffer[:5000], payloads[0])
    assert student.receive_header().ticket == 7
    second = teacher.payloads.start(payloads[1])
    student.payloads.receive(slot, 5000)
    second.wait()
    assert torch.equal(slot.buffer[:5000], payloads[1])


def test_a_message_of_several_pieces_arrives_whole(monkeypatch):
    monkeypatch.setattr("disaggkd_cli.transport.pair.CHUNK_BYTES", 1000)
    student, teacher = form_both()
    payload = torch.arange(4096).to(torch.uint8)
    (slot,) = make_slots(1, 4096)
    sent = teacher.payloads.start(payload)
    student.payloads.receive(slot, 4096)
    sent.wait()
    assert torch.equal(slot.buffer, payload)


def test_a_link_hangs_up_with_a_header_posted_ahead():
    student, teacher = form_both()
    sending = send_in_background(teacher.send_header, Header(Kind.PING))
    student.receive_header()
    sending.join()
    student.close()
    with pytest.raises(LinkLost, match="closed, cannot send a PING header"):
        student.send_header(Header(Kind.PING))
    with pytest.raises(LinkLost, match="the peer is gone"):
        teacher.receive_header()


def test_a_header_of_another_generation_is_refused():
    student, teacher = form_both(generations=(1, 2))
    send_in_background(teacher.send_header, Header(Kind.PING))
    with pytest.raises(ProtocolError, match="generation 2, not 1"):
        student.receive_header()


def test_a_silent_peer_is_lost_at_the_timeout():
    student, teacher = form_both(timeout=0.5)
    with pytest.raises(LinkLost, match=r"timeout 0.5 s\), the peer stalled"):
        student.receive_header()


def test_a_fault_of_a_payload_falls_between_its_ready_and_the_payload():
    """And the payload before it is over by then, and its buffer given back."""
    done = []

    class Payloads:
        checksums = True

        def stage(self, payload):
            done.append("stage")
            return payload

        def start(self, staged):
            done.append("start")
            return SimpleNamespace(wait=lambda: done.append("over"))

    link = SimpleNamespace(payloads=Payloads(), send_header=lambda header: done.append(header))
    server = SimpleNamespace(
        identity=Identity("teacher 0"), device=torch.device("cpu"), timeout=4, checksum=True,
        faults=SimpleNamespace(at_payload=lambda payload: (done.append("fault"), payload)[1]),
        buffer_free=lambda link, buffer: done.append(f"free {buffer}"),
    )  # fmt: skip
    teacher = TeacherLink(server, 1, Identity("student 0"), None, 0)
    for buffer in (0, 1):
        reply = Reply(Header(Kind.READY, ticket=buffer), torch.ones(3, dtype=torch.uint8), buffer)
        teacher._send_payload(link, reply)
    headers = [item for item in done if isinstance(item, Header)]
    assert [header.ticket for header in headers] == [0, 1] and all(header.checksum for header in headers)
    assert [item for item in done if not isinstance(item, Header)] == [
        "stage", "fault", "start", "stage", "over", "free 0", "fault", "start",
    ]  # fmt: skip
    assert done.index(headers[1]) < done.index("over")
