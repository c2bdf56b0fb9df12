"""The errors that cross rooms, each with the exit code that the command line gives it."""

from __future__ import annotations


class DisaggkdError(Exception):
    """An error whose message is meant for a person; printed without a traceback.

    Attributes:
        exit_code: what the process exits with.
    """

    exit_code = 1


class UserError(DisaggkdError):
    """What the user can mend: a config key, a file, a vocabulary, a busy port. The message names it and the mend."""

    exit_code = 2


class RunError(DisaggkdError):
    """A fault of a run: a peer that died for good, a payload that stayed corrupt. The message names the cause."""

    exit_code = 1


class SavedAndResumable(DisaggkdError):
    """The run stopped early, but its state is saved and `--resume auto` goes on from it."""

    exit_code = 75


class StoppedByHand(DisaggkdError):
    """A person pressed Ctrl-C where there was nothing to save."""

    exit_code = 130
