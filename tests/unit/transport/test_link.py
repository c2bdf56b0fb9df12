"""Headers run ahead of payloads, and what is posted ahead never stands in the way of hanging up."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from disaggkd_cli.transport import Identity, LinkLost, ProtocolError
from disaggkd_cli.transport.answers import Reply
from disaggkd_cli.transport.link import STUDENT, TEACHER, form_link
from disaggkd_cli.transport.protocol import Header, Kind
from disaggkd_cli.transport.slots import make_slots
from disaggkd_cli.transport.teacher_link import TeacherLink

pytestmark = pytest.mark.timeout(60)


def form_both(timeout=10, generations=(1, 1), forming_timeout=None):
    store, links = dist.HashStore(), {}

    def form(side):
        links[side] = form_link(
            store, "k", side, name=f"side {side}", generation=generations[side], timeout=timeout,
            forming_timeout=forming_timeout,
        )  # fmt: skip

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
    student.payloads.start_receive(slot, 5000).wait()
    first.wait()
    assert torch.equal(slot.buffer[:5000], payloads[0])
    assert student.receive_header().ticket == 7
    second = teacher.payloads.start(payloads[1])
    student.payloads.start_receive(slot, 5000).wait()
    second.wait()
    assert torch.equal(slot.buffer[:5000], payloads[1])


def test_a_message_of_several_pieces_arrives_whole(monkeypatch):
    monkeypatch.setattr("disaggkd_cli.transport.pair.CHUNK_BYTES", 1000)
    student, teacher = form_both()
    payload = torch.arange(4096).to(torch.uint8)
    (slot,) = make_slots(1, 4096)
    sent = teacher.payloads.start(payload)
    student.payloads.start_receive(slot, 4096).wait()
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


def test_a_peer_may_take_longer_than_forming_the_link():
    student, teacher = form_both(timeout=30, forming_timeout=1)

    def send_late():
        time.sleep(2.5)
        teacher.send_header(Header(Kind.PING))

    send_in_background(send_late)
    assert student.receive_header().kind is Kind.PING


def test_a_second_wait_for_one_transfer_returns_at_once():
    student, teacher = form_both()
    sent = teacher.start_header(Header(Kind.PING))
    student.receive_header()
    sent.wait()
    sent.wait()


def done_by_a_teacher(posted_ahead, checksum=True):
    """Return, in order, what the sending thread does for two replies."""
    done = []

    def transfer(name):
        return SimpleNamespace(wait=lambda: done.append(f"{name} over"))

    class Payloads:
        checksums = True

        def __init__(self):
            self.posted_ahead = posted_ahead

        def stage(self, payload):
            return payload

        def start(self, staged):
            done.append(f"payload {int(staged[0])}")
            return transfer(f"payload {int(staged[0])}")

    def start_header(header):
        assert bool(header.checksum) is checksum
        done.append(f"ready {header.ticket}")
        return transfer(f"ready {header.ticket}")

    link = SimpleNamespace(payloads=Payloads(), start_header=start_header)
    server = SimpleNamespace(
        identity=Identity("teacher 0"), device=torch.device("cpu"), timeout=4, checksum=checksum,
        faults=SimpleNamespace(at_payload=lambda payload, ready: payload),
        reply_gone=lambda link, buffer: done.append(f"free {buffer}"),
    )  # fmt: skip
    teacher = TeacherLink(server, 1, 1, Identity("student 0"), None, None, 0)
    for number in (1, 2):
        payload = torch.full((3,), number, dtype=torch.uint8)
        teacher._send_payload(link, Reply(Header(Kind.READY, ticket=number), payload, number))
    return done


def test_a_payload_is_under_way_before_the_one_ahead_of_it_is_over():
    assert done_by_a_teacher(posted_ahead=True) == [
        "ready 1", "payload 1", "ready 1 over", "ready 2", "payload 2", "payload 1 over", "free 1", "ready 2 over",
    ]  # fmt: skip


def test_where_nothing_is_posted_ahead_a_payload_starts_after_its_ready_and_the_one_before_are_over():
    done = done_by_a_teacher(posted_ahead=False)
    assert done[done.index("ready 2") :] == [
        "ready 2", "ready 2 over", "payload 1 over", "free 1", "payload 2", "ready 2 over",
    ]  # fmt: skip


def test_without_the_checksum_switch_a_ready_carries_none():
    assert done_by_a_teacher(posted_ahead=True, checksum=False)  # which looks at each header
