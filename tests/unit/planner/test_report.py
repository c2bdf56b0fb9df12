"""The page of text at several widths, and that no name in a config steers a terminal or a page."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.cells import cell_len

from disaggkd_cli import terminal
from disaggkd_cli.config import load
from disaggkd_cli.errors import UserError
from disaggkd_cli.planner.command import plan_command
from disaggkd_cli.planner.inputs import workload_of
from disaggkd_cli.planner.options import PlanOptions
from disaggkd_cli.planner.plan import make_plan
from disaggkd_cli.planner.report_text import verdict_lines
from disaggkd_cli.planner.sweep import parse_sweep
from disaggkd_cli.units import printable

ROOT = Path(__file__).parents[3]
HOSTILE = "\x1b[31mred\x1b]0;title\x07\x9b2J\u202eevil<script>alert(1)</script>[bold]x[/bold]"


def printed(config, width: int = 80, **options) -> str:
    console = terminal.console(file=io.StringIO(), width=width)
    plan_command(config, PlanOptions(**options), console)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def reference():
    return load(ROOT / "configs" / "qwen3-235b-a22b-to-8b.yaml", ["hardware.gpu_hour_price=2.5"])


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("options", [{}, {"gpus": 64}, {"simulate": True}])
def test_it_reads_well_at_every_width(reference, width, options):
    """No line is too long, nothing is cut off, and every label and unit is whole on one line."""
    text = printed(reference, width, **options)
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    for words in (
        "colocated,",
        "full logits",
        "disaggregated,",
        "bottleneck",
        "largest micro-batch",
        "student rank, GiB",
    ):
        assert words in text
    assert all(re.search(r"\d+\.\d GiB", line) for line in text.splitlines() if "█" in line and "█ " not in line[:4])
    assert not re.search(r"^\s*(GiB|tok/s|tokens)\s*$", text, re.MULTILINE)


def test_the_verdict_needs_no_other_knowledge(reference):
    lines = dict(verdict_lines(make_plan(workload_of(reference))))
    assert list(lines) == ["take", "because", "costs", "limited by", "to change"]
    assert "2.5 a GPU-hour" in lines["costs"]


def test_nothing_that_fits_has_one_line(reference):
    small = load(ROOT / "configs" / "qwen3-235b-a22b-to-8b.yaml", ["hardware.gpu=A10G"])
    assert list(dict(verdict_lines(make_plan(workload_of(small))))) == ["because"]


def test_hostile_names_reach_neither_terminal_nor_page(tmp_path):
    model = tmp_path / HOSTILE.replace("/", "_")
    model.mkdir()
    fields = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 512,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(fields))
    (tmp_path / "catalogue.yaml").write_text(
        "gpus:\n  " + json.dumps(HOSTILE) + ": {memory_gib: 48, bf16_tflops: 100, matmul_tflops: 80, hbm_tb_per_s: 1, "
        "price_per_hour: 1, price_date: " + json.dumps(HOSTILE) + "}\n"
    )
    config = load(ROOT / "configs" / "one-node.yaml")
    config.teacher.model = config.student.model = str(model)
    config.hardware.catalogue, config.hardware.gpu = str(tmp_path / "catalogue.yaml"), HOSTILE
    page = tmp_path / "page\x1b[31m.html"
    for options in (
        {"html": str(page)},
        {"explain": "all"},
        {"explain": "teacher"},
        {"json": True},
        {"gpus": 8, "simulate": True},
        {"sweep": ["seed=1,2"]},
    ):
        text = printed(config, 100, **options)
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text), options
    written = page.read_text(encoding="utf-8")
    assert "<script" not in written and "evil&lt;script&gt;" in written


def test_a_sweep_over_nonsense_is_refused():
    with pytest.raises(UserError, match=r"--sweep: run_dir=.*is no value") as refused:
        parse_sweep("run_dir=" + HOSTILE)
    assert "\x1b" not in str(refused.value)


def test_printable():
    assert printable("a\nb é 漢 ⇒") == "a\nb é 漢 ⇒"
    assert printable("\x1b[31m\x9b\u202e\r") == "\\x1b[31m\\x9b\\u202e\\r"
