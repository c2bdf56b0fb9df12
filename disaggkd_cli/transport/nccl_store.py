"""The store of one NCCL pair: it leads to the run's store while the pair forms, and nowhere afterwards.

A NCCL group of torch takes the store beneath all prefixes for that of every group of the run: what its watchdog writes
there (the signal to dump and end) is read by groups that have nothing to do with the pair, each of which then ends its
process. A prefix therefore protects nobody. This store is the lowest that the group can reach.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


class NcclPairStore(dist.Store):
    """A store of two, which torch calls from C++.

    Args:
        store: the run's store, below the prefix of this pair.
    """

    def __init__(self, store: dist.Store):
        super().__init__()
        self._behind = store

    def leave(self) -> None:
        """From now on keep to this process whatever is written, and find nothing that others write."""
        self._behind = dist.HashStore()

    def set(self, key: str, value: str | bytes) -> None:
        """See `dist.Store.set`."""
        self._behind.set(key, value)

    def get(self, key: str) -> bytes:
        """See `dist.Store.get`."""
        return self._behind.get(key)

    def add(self, key: str, amount: int) -> int:
        """See `dist.Store.add`."""
        return self._behind.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        """See `dist.Store.check`."""
        return self._behind.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """See `dist.Store.wait`."""
        if timeout is None:
            self._behind.wait(keys)
        else:
            self._behind.wait(keys, timeout)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """See `dist.Store.compare_set`."""
        return self._behind.compare_set(key, expected, desired)

    def deleteKey(self, key: str) -> bool:  # noqa: N802  the name by which C++ looks for it
        """See `dist.Store.delete_key`."""
        return self._behind.delete_key(key)

    def getNumKeys(self) -> int:  # noqa: N802  the name by which C++ looks for it
        """See `dist.Store.num_keys`."""
        return self._behind.num_keys()
