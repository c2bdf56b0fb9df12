"""Who does not know the run's secret is not heard: at the rendezvous, on a link, in a payload."""

import os
import secrets
import socket
import struct
import threading
import zlib
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from disaggkd_cli.transport import Identity, LinkLost, ProtocolError, Secret, open_store
from disaggkd_cli.transport.announced import Invitations, Roster
from disaggkd_cli.transport.authentication import NO_TAG, other_secret, tell_secret, tell_secret_file, told_secret_file
from disaggkd_cli.transport.checksum import body_checks, body_problem
from disaggkd_cli.transport.errors import Unproved
from disaggkd_cli.transport.link import STUDENT, TEACHER, form_link
from disaggkd_cli.transport.listeners import _listening
from disaggkd_cli.transport.probe import compare_probes
from disaggkd_cli.transport.protocol import Header, Kind
from disaggkd_cli.transport.rendezvous import announce_teacher, invitation_keys, invite_teacher, teacher_key


def fresh():
    return Secret(secrets.token_bytes(32))


@pytest.fixture
def store():
    return dist.HashStore()


@pytest.fixture(scope="module")
def meeting():
    return open_store("127.0.0.1:0", host_it=True)


@pytest.fixture
def ours():
    return fresh()


def sessions(secret, theirs=None, link="link/1"):
    nonces = secrets.token_bytes(16), secrets.token_bytes(16)
    return secret.session(link, STUDENT, nonces), (theirs or secret).session(link, TEACHER, nonces)


def pair_of(meeting, secrets_of, key=None):
    """Return both sides of a link, or what forming it raised, by side."""
    key, found = key or f"link/{secrets.token_hex(4)}", {}

    def form(side):
        try:
            found[side] = form_link(
                meeting.clone(), key, side, name=f"side {side}", generation=1, timeout=10, forming_timeout=1,
                secret=secrets_of[side],
            )  # fmt: skip
        except LinkLost as error:
            found[side] = error

    threads = [threading.Thread(target=form, args=(side,)) for side in (STUDENT, TEACHER)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found[STUDENT], found[TEACHER]


def say(send, *arguments, **fields):
    """Send beside what receives here: a send ends only once the other side takes it."""
    threading.Thread(target=send, args=arguments, kwargs=fields, daemon=True).start()


def test_an_announcement_of_somebody_else_is_skipped_and_named(store, ours):
    lines = []
    roster = Roster(store, lines.append, secret=ours)
    honest = Identity("teacher 0", "f")
    announce_teacher(store, honest, ours)
    announce_teacher(store, Identity("teacher 1", "f"), fresh())
    announce_teacher(store, Identity("teacher 2", "f"))
    assert roster.read() == {0: honest}
    assert len(lines) == 2 and all("not signed with this run's secret" in line for line in lines)


def test_a_true_announcement_counts_under_its_own_number_only(store, ours):
    lines = []
    number = announce_teacher(store, Identity("teacher 0", "f"), ours)
    copied = store.get(teacher_key(number, "identity"))
    other = announce_teacher(store, Identity("teacher 1", "f"), ours)
    store.set(teacher_key(other, "identity"), copied)
    assert set(Roster(store, lines.append, secret=ours).read()) == {number}
    assert "not signed" in lines[0]


def test_an_invitation_of_somebody_else_is_skipped(store, ours):
    lines = []
    invite_teacher(store, 0, Identity("student 9"), fresh())
    generation = invite_teacher(store, 0, Identity("student 0"), ours)
    _, key = invitation_keys(0, generation)
    found = Invitations(store, 0, lines.append, secret=ours).next()
    assert found == (generation, Identity("student 0"))
    assert "invitation 1 at the rendezvous is skipped" in lines[0] and key.endswith("/2")


def test_a_probe_of_somebody_else_is_written_anew(store, ours):
    first, second = (Identity(f"teacher {n}", probe=probe, numerics="bfloat16") for n, probe in enumerate(["aa", "bb"]))
    store.compare_set("disaggkd/probe", "", "00 teacher 9 (float8)")
    assert compare_probes(store, first, ours) == ""
    assert compare_probes(store, first, ours) == ""
    assert "other bits" in compare_probes(store, second, ours)


def test_those_with_another_secret_meet_elsewhere(store, ours):
    ours.rooted(store).set("who", b"ours")
    assert not fresh().rooted(store).check(["who"]) and not store.check(["who"])
    assert Secret().rooted(store) is store


def test_sides_with_different_secrets_are_told_so(store, ours):
    assert other_secret(store, "student", ours) == ""
    tell_secret(store, "student", ours)
    assert other_secret(store, "student", ours) == ""
    assert "launch.secret_file" in other_secret(store, "student", fresh())
    assert "'none'" in other_secret(store, "student", Secret())
    assert ours.name not in ("none", "") and len(ours.name) == 8


def test_the_student_says_where_the_file_is(store, tmp_path):
    assert told_secret_file(store, "secret") is None
    tell_secret_file(store, tmp_path / "secret")
    assert told_secret_file(store, "secret") == tmp_path / "secret"
    for lie in (b"/etc/passwd", b"secret", b"../secret", b"/" + b"x" * 10**6, b"\xff"):
        store.set("disaggkd/secret/file", lie)
        assert told_secret_file(store, "secret") is None


def test_a_header_is_taken_once_in_order_from_the_other_side():
    student, teacher = sessions(fresh())
    first, second = (Header(Kind.READY, ticket=number).encode(teacher) for number in (1, 2))
    assert Header.decode(first, student).ticket == 1
    with pytest.raises(Unproved):
        Header.decode(first, student)  # the same one again
    student, teacher = sessions(fresh())
    _, second = (Header(Kind.READY, ticket=number).encode(teacher) for number in (1, 2))
    with pytest.raises(Unproved):
        Header.decode(second, student)  # one was left out
    student, _ = sessions(fresh())
    with pytest.raises(Unproved):
        Header.decode(Header(Kind.PING).encode(student), student)  # its own, thrown back
    with pytest.raises(Unproved):
        Header.decode(Header(Kind.PING).encode(), sessions(fresh())[0])


@pytest.mark.parametrize("what", ["secret", "nonce", "link"])
def test_sessions_differ_by_secret_link_and_fresh_numbers(what):
    secret = fresh()
    student, _ = sessions(secret)
    _, other = sessions(fresh() if what == "secret" else secret, link="link/2" if what == "link" else "link/1")
    assert student.name != other.name
    with pytest.raises(Unproved):
        Header.decode(Header(Kind.PING).encode(other), student)


def test_every_signed_byte_counts():
    secret, rng = fresh(), torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "little"))
    for position in torch.randint(0, 108, (20,), generator=rng).tolist():
        student, teacher = sessions(secret)
        data = bytearray(Header(Kind.READY, ticket=7, body_tag=secrets.token_bytes(16)).encode(teacher))
        data[position] ^= 1 << (position % 8)
        with pytest.raises(LinkLost):
            Header.decode(refreshed(data), student)


def refreshed(data):
    """The header with its crc32 made right again, as whoever changes it would."""
    return bytes(data[:-4]) + struct.pack("<I", zlib.crc32(bytes(data[:-4])))


def test_a_payload_is_held_against_its_tag():
    student, teacher = sessions(fresh())
    payload = torch.randint(0, 256, (4099,), dtype=torch.uint8)
    checks = body_checks(payload, teacher)
    assert body_problem(payload, 0, checks["body_tag"], student) == ""
    changed = payload.clone()
    changed[int(torch.randint(4099, ()))] ^= 1
    assert "tag is wrong" in body_problem(changed, 0, checks["body_tag"], student)
    assert "tag is wrong" in body_problem(payload, 0, checks["body_tag"], sessions(fresh())[0])
    plain = body_checks(payload, None)
    assert set(plain) == {"checksum"} and "checksum is wrong" in body_problem(changed, plain["checksum"], NO_TAG, None)


def test_two_sides_with_one_secret_talk(meeting, ours):
    student, teacher = pair_of(meeting, [ours, ours])
    for number in range(3):
        say(teacher.send_text, Kind.ERROR, f"text {number}".encode(), ticket=number)
        header = student.receive_header()
        assert (header.ticket, student.receive_text(header)) == (number, f"text {number}".encode())
    say(student.send_header, Header(Kind.PING))
    assert teacher.receive_header().kind is Kind.PING
    student.close(), teacher.close()


def test_a_text_that_nobody_signed_is_refused(meeting, ours):
    student, teacher = pair_of(meeting, [ours, ours])
    body = torch.zeros(8, dtype=torch.uint8)
    sent = teacher.start_message(Header(Kind.ERROR), body)
    header = student.receive_header()
    with pytest.raises(ProtocolError, match="nobody signed"):
        student.receive_text(header)
    sent.wait()
    student.close(), teacher.close()


def test_sides_with_different_secrets_do_not_even_meet(meeting, ours):
    assert all(isinstance(side, LinkLost) for side in pair_of(meeting, [ours, fresh()]))
    assert all(isinstance(side, LinkLost) for side in pair_of(meeting, [ours, Secret()]))


def test_who_takes_a_sides_place_at_the_rendezvous_is_found_out(meeting, ours):
    """An impostor may read the fresh numbers and the name of the meeting place; what it sends still proves nothing."""
    key = f"link/{secrets.token_hex(4)}"
    found = {}

    def impersonate():
        store = meeting.clone()
        store.set_timeout(timedelta(seconds=5))
        store.get(f"{key}/nonce/{STUDENT}")
        store.set(f"{key}/nonce/{TEACHER}", secrets.token_bytes(16))
        deadline = 50
        while deadline and not (
            names := {k.split("/")[2] for k in store.list_keys() if k.startswith(key + "/")} - {"nonce"}
        ):
            threading.Event().wait(0.02)
            deadline -= 1
        (name,) = names
        found["link"] = form_link(meeting.clone(), f"{key}/{name}", TEACHER, name="impostor", generation=1, timeout=5)

    thread = threading.Thread(target=impersonate)
    thread.start()
    student = form_link(meeting.clone(), key, STUDENT, name="student", generation=1, timeout=5, secret=ours)
    thread.join()
    say(found["link"].send_text, Kind.WELCOME, Identity("teacher 0").encode())
    with pytest.raises(Unproved):
        student.receive_header()
    student.close(), found["link"].close()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux's /proc")
def test_nobody_else_can_connect_to_a_link_once_it_has_formed(meeting):
    before = _listening()
    student, teacher = pair_of(meeting, [Secret(), Secret()])
    listeners = _listening() - before
    assert len(listeners) == 2
    for descriptor in listeners:
        listener = socket.socket(fileno=os.dup(descriptor))
        with listener, pytest.raises(OSError):
            socket.create_connection(listener.getsockname(), timeout=0.3)
    say(teacher.send_header, Header(Kind.PING))
    assert student.receive_header().kind is Kind.PING
    student.close(), teacher.close()
