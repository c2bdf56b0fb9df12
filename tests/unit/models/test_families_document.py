"""The table of families in the documents is what the tests prove."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(120)
def test_the_table_is_up_to_date():
    spec = importlib.util.spec_from_file_location("model_families", ROOT / "scripts" / "model_families.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = script.DOCUMENT.read_text(encoding="utf-8")
    assert script.written(text) == text, "run: python scripts/model_families.py"
