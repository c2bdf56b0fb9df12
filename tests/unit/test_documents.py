"""Documents point at what is there: files, pages, commands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
_LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
_PATH = re.compile(r"`((?:disaggkd_cli|scripts|tests|configs|examples|docs)/[\w./-]+\.\w+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    links = [link for link in _LINK.findall(text) if not (page.parent / link).exists()]
    paths = [path for path in _PATH.findall(text) if not (ROOT / path).exists()]
    assert not links and not paths


def test_the_changelog_has_this_version():
    from disaggkd_cli import __version__

    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
