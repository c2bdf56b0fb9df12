"""Connections to the rendezvous store that links borrow while they form.

A store serves one blocking call at a time, so each link that forms needs a connection of its own. Opening one is not
free: torch's client looks up the name of the address it connects to, which takes seconds where no name server answers.
"""

from __future__ import annotations

import threading

import torch.distributed as dist

MOST_FORMING = 8
"""Links that a rank forms at the same time; the next ones wait for their turn."""


class StoreConnections:
    """At most `most` connections to one store, opened when first needed and used again. Any thread may call."""

    def __init__(self, store: dist.Store, most: int = MOST_FORMING):
        self._store = store
        self._guard = threading.Lock()
        self._idle: list[dist.Store] = []
        self._left = most

    def borrow(self) -> dist.Store | None:
        """Return a connection, or None when all are lent; a later call may get one.

        Raises:
            RuntimeError: the store does not answer.
        """
        with self._guard:
            if self._idle:
                return self._idle.pop()
            if not self._left:
                return None
            self._left -= 1
        try:
            return self._store.clone()
        except RuntimeError:
            self.lose()
            raise

    def give_back(self, connection: dist.Store) -> None:
        """Take a connection back that is in order."""
        with self._guard:
            self._idle.append(connection)

    def lose(self) -> None:
        """Forget a connection that may be broken, or that somebody keeps; another one may be opened in its place."""
        with self._guard:
            self._left += 1
