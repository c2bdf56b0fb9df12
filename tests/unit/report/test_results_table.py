"""The README's results block, from measurements as `bench step` and `bench frontier` print them."""

import importlib.util
from dataclasses import asdict
from pathlib import Path

from disaggkd_cli.bench.frontier import OK, OUT_OF_MEMORY, Cell

PATH = Path(__file__).parents[3] / "scripts" / "results_table.py"
SPEC = importlib.util.spec_from_file_location("results_table", PATH)
results_table = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(results_table)


def test_every_claim_is_printed_whichever_way_it_falls():
    one = {
        "tokens_per_second": 700.0, "tokens_per_second_spread": [600.0, 720.0], "step_seconds": 0.7,
        "stall_share": 0.01, "idle_share": 0.2, "peak_bytes": {"student": 1 << 29, "teacher": 1 << 28},
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
    assert "| disaggregated, fused loss | 700 (600 to 720) | 0.700 s | 1% | 20% |" in text
    assert "| holds |" in text and "| **does not hold** |" in text and "| cannot be told |" in text


def test_cells_that_differ_from_the_prediction_are_marked():
    cells = [
        Cell("colocated_full", "vocabulary", 8192, OK, {"colocated": 1 << 20}, OUT_OF_MEMORY, {}),
        Cell("disaggregated_fused", "vocabulary", 8192, OK, {"student": 2 << 20, "teacher": 1 << 20}, OK, {}),
    ]
    result = {
        "config": "c.yaml", "cap_bytes": 256 << 20, "baseline_bytes": {"student": 1 << 28},
        "cells": [asdict(cell) for cell in cells], "agreement": {"agree": 1, "cells": 2}, "statements": ["so it is"],
    }  # fmt: skip
    text = "\n".join(results_table.frontier_block([result, {**result, "cells": []}]))
    row = "| size of the vocabulary: 8,192 | out of memory (ok, 1.00 MiB, **differs**) | not run | ok (ok, 2.00 MiB) |"
    assert row in text
    assert "agree in 2 of 4 cells" in text and "* so it is" in text
