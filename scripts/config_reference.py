"""Write docs/config.md, the page of every key, from the schema.

python scripts/config_reference.py            print it
python scripts/config_reference.py --write    replace docs/config.md
"""

from __future__ import annotations

import argparse
from pathlib import Path

from disaggkd_cli.config.reference import as_markdown

PAGE = Path(__file__).parents[1] / "docs" / "config.md"


def main() -> None:
    """Print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"replace {PAGE.name}")
    if parser.parse_args().write:
        PAGE.write_text(as_markdown(), encoding="utf-8")
    else:
        print(as_markdown(), end="")


if __name__ == "__main__":
    main()
