"""What was noticed on the way and is not an error: counted, with the place of the first, for the user to read."""

from __future__ import annotations


class Notes:
    """Counts remarks by their text. A remark may hold `{count}` and `{first}`; without them it is said once."""

    def __init__(self) -> None:
        self._count: dict[str, int] = {}
        self._first: dict[str, str] = {}

    def add(self, remark: str, where: str = "", count: int = 1) -> None:
        self._count[remark] = self._count.get(remark, 0) + count
        self._first.setdefault(remark, where)

    def lines(self) -> list[str]:
        """The remarks in the order in which they first came up."""
        return [
            remark.replace("{count}", str(count)).replace("{first}", self._first[remark])
            for remark, count in self._count.items()
        ]
