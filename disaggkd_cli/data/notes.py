"""What was noticed on the way and is not an error: counted, with the place of the first, for the user to read."""

from __future__ import annotations


class Notes:
    """Counts remarks by their text. A remark may hold `{count}` and `{first}`; without them it is said once."""

    def __init__(self, state: dict[str, list] | None = None) -> None:
        self._found: dict[str, list] = {remark: list(found) for remark, found in (state or {}).items()}

    def add(self, remark: str, where: str = "", count: int = 1) -> None:
        self._found.setdefault(remark, [0, where])[0] += count

    def merge(self, later: Notes) -> None:
        """Add what `later` noticed after this."""
        for remark, (count, first) in later._found.items():
            self.add(remark, first, count)

    def found(self, remark: str) -> tuple[int, str]:
        """How often a remark was made, and the place of the first."""
        count, first = self._found.get(remark, (0, ""))
        return count, first

    def drain(self) -> Notes:
        """Take out what was noticed since the last time."""
        taken, self._found = Notes(self._found), {}
        return taken

    def state(self) -> dict[str, list]:
        """All of it as plain data, for `Notes(state)`: remark → [count, place of the first]."""
        return {remark: list(found) for remark, found in self._found.items()}

    def lines(self) -> list[str]:
        """The remarks in the order in which they first came up."""
        return [
            remark.replace("{count}", str(count)).replace("{first}", first)
            for remark, (count, first) in self._found.items()
        ]
