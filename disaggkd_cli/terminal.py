"""The one way to a terminal: nothing that a text brings along steers it, whoever wrote the text.

Names of peers, models and files, texts of configs and of logs are printed with control characters and direction marks
spelled out, and without rich's markup: `[bold]` in a path stays what it is. A test sees to it that nobody else prints.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TextIO

from disaggkd_cli.units import printable

if TYPE_CHECKING:
    from rich.console import Console


def write(text: str, file: TextIO | None = None, *, end: str = "\n") -> None:
    """Print `text` on stdout, or on `file`, at once."""
    print(printable(text), file=file or sys.stdout, end=end, flush=True)


def console(**settings: Any) -> Console:
    """Return a console of rich that takes texts literally; see rich for `settings`."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class LiteralConsole(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                text, style, control = segment
                # What rich itself says to the terminal is in control segments and styles.
                yield segment if control or text.isprintable() else Segment(printable(text), style)

    return LiteralConsole(markup=False, emoji=False, **settings)
