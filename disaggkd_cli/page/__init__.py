"""Self-contained HTML pages: one style, inline SVG, no script, nothing loaded from anywhere."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from disaggkd_cli import files
from disaggkd_cli.errors import UserError
from disaggkd_cli.units import printable

_STYLE = Path(__file__).with_name("style.html")


def render_page(title: str, parts: Iterable[str]) -> str:
    """Return a whole page of the given HTML parts; what could reorder its lines stands spelled out."""
    return printable(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>{_STYLE.read_text(encoding='utf-8')}</head>\n"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def write_page(path: Path, text: str, option: str) -> None:
    """Write a page, replacing the file in one move so that an open browser never reads half of it.

    Raises:
        UserError: naming `option` and the file that cannot be written.
    """
    try:
        files.write_text(path, text)
    except OSError as error:
        raise UserError(f"{option}: {path} cannot be written: {error.strerror}") from None


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table of cells that are HTML already."""
    header = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{header}</tr>{body}</table>"


def legend(names: Iterable[tuple[str, str]]) -> str:
    """Return a legend of (name, colour) pairs."""
    items = "".join(f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in names)
    return f'<p class="legend">{items}</p>'
