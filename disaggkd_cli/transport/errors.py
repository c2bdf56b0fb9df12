"""What can go wrong between a student rank and a teacher replica, as types."""

from __future__ import annotations

from disaggkd_cli.errors import RunError, SavedAndResumable, UserError


class LinkLost(RunError):
    """The pair group is unusable: the peer died, stalled past the timeout, or hung up. Form a new link."""


class ProtocolError(LinkLost):
    """The peer sent something that the protocol does not allow here. The link is closed, the payload never received."""


class Unproved(LinkLost):
    """What came is not signed with the run's secret: somebody stands where the peer should. The peer may come again."""


class StaleReply(ProtocolError):
    """A reply to a ticket that is not open on this link: late, duplicated, or of another link's life."""


class CorruptPayload(RunError):
    """A payload whose checksum, token hash or values are wrong. It never reaches a lease."""


class ForwardFailed(RunError):
    """The teacher reports that its forward of a request raised."""


class IncompatiblePeer(UserError):
    """Student and teacher do not belong together; the message names the field and both sides' values."""


class TeachersLost(RunError):
    """No teacher for `transport.teacher_wait` seconds. The trainer saves and exits 75."""


class RequestsExhausted(RunError):
    """Every request of the ring's iterator has been taken."""


class ChannelWedged(SavedAndResumable):
    """A transfer between GPUs neither ended nor could be aborted: the process ends, and goes on from a checkpoint."""
