"""Headers run ahead of payloads, and what is posted ahead never stands in the way of hanging up."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from disaggkd_cli.transport import Identity, LinkLost, ProtocolError
from disaggkd_cli.transport.answers import Reply
from disaggkd_cli.transport.link import INLINE_BYTES, STUDENT, TEACHER, form_link
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


def exchange(send, receive):
    """Return what `receive` returns while `send` runs beside it."""
    sending = threading.Thread(target=send)
    sending.start()
    try:
        return receive()
    finally:
        sending.join(20)


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


def done_by_a_teacher(posted_ahead, checksum=True, small=False):
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

    def start_message(header, body):
        assert bool(header.checksum) is checksum and len(body) == 3
        done.append(f"message {header.ticket}")
        return transfer(f"message {header.ticket}")

    link = SimpleNamespace(
        payloads=Payloads(),
        start_header=start_header,
        start_message=start_message,
        carries=lambda size: small,
        session=None,
    )
    server = SimpleNamespace(
        identity=Identity("teacher 0"), device=torch.device("cpu"), timeout=4, checksum=checksum, cuda=None,
        faults=SimpleNamespace(at_payload=lambda payload, ready: payload),
        reply_gone=lambda link, buffer: done.append(f"free {buffer}"),
    )  # fmt: skip
    teacher = TeacherLink(server, 1, 1, Identity("student 0"), None, None, 0)
    for number in (1, 2):
        payload = torch.full((3,), number, dtype=torch.uint8)
        teacher._send_payload(link, Reply(Header(Kind.READY, ticket=number, body_bytes=3), payload, number))
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


def test_a_small_payload_goes_with_its_ready_and_holds_its_buffer_until_it_is_taken():
    assert done_by_a_teacher(posted_ahead=True, small=True) == ["message 1", "message 2", "message 1 over", "free 1"]


def test_without_the_checksum_switch_a_ready_carries_none():
    for small in (False, True):
        assert done_by_a_teacher(posted_ahead=True, checksum=False, small=small)  # which looks at each header


@pytest.mark.parametrize("size", [1, 5000, INLINE_BYTES])
def test_a_small_body_comes_with_its_header(size):
    student, teacher = form_both()
    bodies = [torch.randint(0, 256, (size,), dtype=torch.uint8) for _ in range(3)]

    def send():
        for number, body in enumerate(bodies):
            teacher.start_message(Header(Kind.READY, ticket=number), body).wait()
        teacher.send_header(Header(Kind.PING))

    def receive():
        for number, body in enumerate(bodies):
            header = student.receive_header()
            assert (header.ticket, header.body_bytes, header.inline) == (number, size, size)
            assert torch.equal(student.inline_body(), body)
        assert student.receive_header().kind is Kind.PING and student.inline_body() is None

    exchange(send, receive)


def test_the_body_stays_while_the_next_message_comes():
    student, teacher = form_both()
    exchange(
        lambda: teacher.start_message(Header(Kind.READY), torch.full((64,), 1, dtype=torch.uint8)).wait(),
        student.receive_header,
    )
    first = student.inline_body()
    teacher.start_message(Header(Kind.READY), torch.full((64,), 2, dtype=torch.uint8)).wait()  # is received already
    assert first.tolist() == [1] * 64
    student.receive_header()
    assert student.inline_body().tolist() == [2] * 64


def test_a_message_that_ends_before_its_body_ends_the_link():
    """Else a peer's wrong word would pass what an earlier message left in the buffer for hidden states."""
    student, teacher = form_both()
    body = torch.full((256,), 7, dtype=torch.uint8)
    for ticket in (1, 2):
        exchange(lambda ticket=ticket: teacher.start_message(Header(Kind.READY, ticket=ticket), body).wait(),
                 student.receive_header)  # fmt: skip
    header = Header(Kind.READY, ticket=3, body_bytes=256, inline=256)
    with pytest.raises(ProtocolError, match="ended before the 256 bytes of body"):
        exchange(lambda: teacher.send_header(header), student.receive_header)


@pytest.mark.parametrize(("announced", "inline"), [(256, 255), (2**30, 2**30), (0, 1)])
def test_a_body_that_cannot_stand_behind_its_header_ends_the_link(announced, inline):
    student, teacher = form_both()
    header = Header(Kind.READY, body_bytes=announced, inline=inline)
    with pytest.raises(ProtocolError, match="behind its header"):
        exchange(lambda: teacher.send_header(header), student.receive_header)


@pytest.mark.parametrize("integers", [4, INLINE_BYTES // 4, INLINE_BYTES // 4 + 1])
def test_requests_of_any_size_arrive(integers):
    student, teacher = form_both()
    body = torch.arange(integers, dtype=torch.int32)
    header = Header(Kind.REQUEST, batch=1, sequence=integers, body_bytes=4 * integers)

    def receive():
        assert teacher.receive_header().body_bytes == 4 * integers
        return teacher.receive_request_body(integers)

    assert torch.equal(exchange(lambda: student.send_request(header, body), receive), body)


def test_a_text_without_its_text_ends_the_link():
    student, teacher = form_both()
    header = exchange(lambda: teacher.send_header(Header(Kind.ERROR, body_bytes=5)), student.receive_header)
    with pytest.raises(ProtocolError, match="ERROR without its text"):
        student.receive_text(header)
