"""The results page's block, from measurements as `bench step` and `bench frontier` print them."""

import importlib.util
from dataclasses import asdict
from pathlib import Path

import pytest

from disaggkd_cli.bench.frontier_report import OK, OUT_OF_MEMORY, Cell

PATH = Path(__file__).parents[3] / "scripts" / "results_table.py"
SPEC = importlib.util.spec_from_file_location("results_table", PATH)
results_table = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(results_table)


def test_every_claim_is_printed_whichever_way_it_falls():
    one = {
        "tokens_per_second": 700.0, "tokens_per_second_spread": [600.0, 720.0], "step_seconds": 0.7,
        "stall_share": 0.01, "idle_share": 0.2, "peak_bytes": {"student": 1 << 31, "teacher": 1 << 30},
        "training_bytes": {"student": 1 << 29, "teacher": 1 << 28}, "ranks": {"student": 1, "teacher": 1},
        "wait_seconds": 0.007, "student_seconds": 0.693, "teacher_busy_seconds": 0.56,
    }  # fmt: skip
    claims = [
        {"claim": f"faster: disaggregated_fused than {number}", "holds": holds, "figures": "1.10 x"}
        for number, holds in enumerate((True, False, None))
    ]
    result = {
        "config": "c.yaml", "steps": 8, "repeats": 3, "ranks": 2, "global_batch_sequences": 8, "sequence_length": 64,
        "modes": {"disaggregated_fused": one}, "claims": claims,
    }  # fmt: skip
    text = "\n".join(results_table.step_block(result))
    assert "| disaggregated, fused loss | 700 (600 to 720) | 0.700 s | 1% | 20% | student 512.00 MiB, " in text
    assert "busy 0.560 s of a step beside the student's 0.693 s; the student waits 0.007 s" in text
    assert "| holds |" in text and "| **does not hold** |" in text and "| cannot be told |" in text


def test_cells_that_differ_from_the_prediction_are_marked():
    cells = [
        Cell("colocated_full", "vocabulary", 8192, OK, {"colocated": 1 << 20}, OUT_OF_MEMORY, {}),
        Cell("disaggregated_fused", "vocabulary", 8192, OK, {"student": 2 << 20, "teacher": 1 << 20}, OK, {}),
    ]
    result = {
        "config": "c.yaml", "cap_bytes": 256 << 20, "baseline_bytes": {"student": 1 << 28},
        "cells": [asdict(cell) for cell in cells], "statements": ["largest vocabulary that trains: none"],
        "agreement": {"agree": 1, "cells": 2, "near_cap": 1, "error": [-0.1, 0.05]},
    }  # fmt: skip
    text = "\n".join(results_table.frontier_block([result, {**result, "cells": [], "overrides": ["a=1"]}]))
    ends = "out of memory (1.00 MiB, **predicted ok**) | not run | ok (2.00 MiB) |"
    assert f"| c, size of the vocabulary: 8,192 | {ends}" in text
    assert "`c.yaml`: prediction and measurement agree in 1 of 2 cells (1 were planned within 5% of the cap)" in text
    assert "-10% to +5% off" in text and "`c.yaml` (a=1)" in text
    assert "* largest size of the vocabulary that trains: none" in text


def test_the_block_goes_between_the_readmes_markers():
    begin, end = results_table.MARKERS
    text = results_table.put_into(f"before\n{begin}\nold\n{end}\nafter\n", "new")
    assert text == f"before\n{begin}\n\nnew\n\n{end}\nafter\n"
    assert results_table.put_into(text, "new") == text
    with pytest.raises(ValueError, match="substring"):
        results_table.put_into("no markers", "new")


def test_the_readme_has_the_markers():
    results_table.put_into(results_table.PAGE.read_text(encoding="utf-8"), "new")
