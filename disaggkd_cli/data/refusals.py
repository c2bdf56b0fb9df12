"""Records that can't be used: a few are left out and counted, many end the run."""

from __future__ import annotations

from disaggkd_cli.data.notes import Notes
from disaggkd_cli.errors import UserError

MOST_REFUSED = 0.05
"""Share of a source's documents above which leaving records out is an error."""


class RefusedRecord(UserError):
    """One record that can't be used, with the reason."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.where = where
        self.reason = reason

    def __reduce__(self) -> tuple:
        return RefusedRecord, (self.where, self.reason)


def note_refused(notes: Notes, key: str, refused: RefusedRecord) -> None:
    """Count one."""
    notes.add(_remark(key), str(refused))


def refuse_many(notes: Notes, key: str, kept: int) -> None:
    """End where more than one document in twenty is refused.

    Args:
        notes: what was noticed of the source.
        key: the source's key in the config.
        kept: documents of it that are used.

    Raises:
        UserError: too many.
    """
    count, first = notes.found(_remark(key))
    if count > MOST_REFUSED * (count + kept):
        raise UserError(f"{key}: {count} of {count + kept} documents can't be used; the first: {first}")


def _remark(key: str) -> str:
    return f"{key}: WARNING, {{count}} documents can't be used and are LEFT OUT (first: {{first}})"
