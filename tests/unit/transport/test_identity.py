"""The handshake's comparison: what does not belong together is refused with both sides' values."""

from dataclasses import replace

import pytest

from disaggkd_cli.errors import UserError
from disaggkd_cli.transport.errors import IncompatiblePeer, ProtocolError
from disaggkd_cli.transport.identity import Identity, compare_identities

STUDENT = Identity("student 0", "abc", "tok", 49152, 576, "bfloat16", "runs/a")
TEACHER = replace(STUDENT, role="teacher 1")


def test_same_values_belong_together_and_round_trip():
    compare_identities(STUDENT, TEACHER)
    assert Identity.decode(TEACHER.encode()) == TEACHER


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("teacher_fingerprint", "xyz"),
        ("tokenizer_fingerprint", "other"),
        ("vocabulary_size", 50257),
        ("hidden_size", 640),
        ("wire_dtype", "float16"),
        ("run_id", "runs/b"),
        ("protocol_version", 9),
    ],
)
def test_each_field_that_differs_is_named_with_both_values(field, value):
    with pytest.raises(IncompatiblePeer) as caught:
        compare_identities(STUDENT, replace(TEACHER, **{field: value}))
    text = str(caught.value)
    assert isinstance(caught.value, UserError)
    for part in ("student 0", "teacher 1", field.replace("_", " "), str(value), str(getattr(STUDENT, field))):
        assert part in text


def test_all_differences_are_listed_at_once():
    with pytest.raises(IncompatiblePeer, match="vocabulary size.*hidden size"):
        compare_identities(STUDENT, replace(TEACHER, vocabulary_size=1, hidden_size=2))


def test_a_side_that_does_not_say_is_not_compared():
    compare_identities(STUDENT, replace(TEACHER, run_id="", teacher_fingerprint="", vocabulary_size=0))


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"role": 1}', b"\xff\xfe", b'"x"', TEACHER.encode()[:-1]])
def test_an_unreadable_introduction_is_a_protocol_error(data):
    with pytest.raises(ProtocolError):
        Identity.decode(data)


def test_wrong_types_and_unknown_fields_are_refused():
    with pytest.raises(ProtocolError):
        Identity.decode(TEACHER.encode().replace(b"49152", b'"49152"'))
    with pytest.raises(ProtocolError):
        Identity.decode(TEACHER.encode().replace(b'"role"', b'"rule"'))
