"""docs/config.md is what the schema says today."""

from pathlib import Path

from disaggkd_cli.config.reference import as_markdown


def test_the_page_is_up_to_date():
    page = Path(__file__).parents[3] / "docs" / "config.md"
    assert page.read_text() == as_markdown(), "run python scripts/config_reference.py --write"
