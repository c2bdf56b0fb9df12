"""How the threads of one rank learn that its replica is over, or has failed."""

from __future__ import annotations

import threading


class ReplicaBroken(BaseException):
    """The replica ends. No Exception: the server answers those of a forward with an ERROR and serves on."""


class Ending:
    """What several threads of a rank share: whether the replica is over or has failed, and a condition to wait on."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._over = False
        self._failure: BaseException | None = None

    def fail(self, error: BaseException) -> bool:
        """End the replica with an error, unless it has ended already; return whether this was news."""
        with self._changed:
            if self._over or self._failure is not None:
                return False
            self._failure = error
            self._changed.notify_all()
            return True
