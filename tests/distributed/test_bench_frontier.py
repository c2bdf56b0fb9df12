"""`disaggkd bench frontier`: real limits, the planner beside each cell, claims said whichever way they fall."""

import json
from dataclasses import asdict

import pytest

from disaggkd_cli.bench.frontier import FrontierOptions, bench_frontier, parse_cap
from disaggkd_cli.bench.frontier_pairs import grown
from disaggkd_cli.bench.frontier_report import (
    FAILED,
    OK,
    OUT_OF_MEMORY,
    Cell,
    agreement,
    format_frontier_report,
    statements,
)
from disaggkd_cli.bench.results import Results
from disaggkd_cli.errors import UserError
from tests.support.runs import TINY_TEACHER, write_config


def cpu_config(folder, **changes):
    changes = {"student__model": str(TINY_TEACHER), "student__from_teacher": None, "launch__device": "cpu", **changes}
    return write_config(folder / "config.yaml", run_dir=str(folder / "run"), **changes)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_frontier_has_both_sides_and_the_planner_beside_it(tmp_path):
    path = cpu_config(tmp_path, loss__memory_budget="4MiB")
    said = []
    options = FrontierOptions(str(path), cap=64 << 20, vocabularies=(2048, 65536), modes=("disaggregated_fused",))
    result = bench_frontier(options, said.append)
    small, large = result["cells"]
    assert (small["measured"], large["measured"]) == (OK, OUT_OF_MEMORY), said
    assert (small["predicted"], large["predicted"]) == (OK, OUT_OF_MEMORY)
    assert "student" in large["reason"] or "teacher" in large["reason"]
    assert (result["agreement"]["agree"], result["agreement"]["cells"]) == (2, 2)
    assert result["statements"] == ["largest vocabulary that trains: disaggregated_fused 2048"]
    assert set(result["baseline_bytes"]) == {"student", "teacher"}
    assert "agree in 2 of 2 cells" in format_frontier_report(result)


def measured_cells(axis, together, apart):
    """Cells of two modes: value and how it ended, for the colocated and the disaggregated one."""
    return [
        Cell(mode, axis, value, OK, {"any": 1 << 20}, ended, {"any": 1 << 20},
             fullest={"role": "any", "phase": "loss", "components": {"ring": 1 << 20}})
        for mode, found in (("colocated_fused", together), ("disaggregated_fused", apart))
        for value, ended in found.items()
    ]  # fmt: skip


@pytest.mark.parametrize(("together", "verdict"), [(OUT_OF_MEMORY, "holds at 16"), (OK, "does not hold")])
def test_what_does_not_hold_is_said(together, verdict):
    found = statements(measured_cells("vocabulary", {8: OK, 16: together}, {8: OK, 16: OK}))
    assert [text for text in found if text.endswith(verdict)]
    assert len(found) == (4 if together == OUT_OF_MEMORY else 2)
    assert together == OK or "ring 1.00 MiB" in found[-1]


def test_a_cell_that_failed_otherwise_is_no_evidence():
    cells = measured_cells("vocabulary", {8: FAILED}, {8: OK})
    assert statements(cells)[-1].endswith("does not hold")
    assert agreement(cells, 1 << 21)["cells"] == 1


def test_fewest_ranks_are_the_best():
    found = statements(measured_cells("ranks", {2: OK, 4: OK}, {2: OUT_OF_MEMORY, 4: OK}))
    assert found[0] == "fewest ranks that trains: colocated_fused 2, disaggregated_fused 4"


def test_cells_near_the_cap_and_the_planners_error_are_counted():
    cells = measured_cells("vocabulary", {8: OK}, {8: OK})
    cells[0].measured_bytes = {"any": 2 << 20}
    found = agreement(cells, cap=(1 << 20) + 1000)
    assert found["near_cap"] == 2 and found["error"] == [-0.5, 0.0]


def test_what_was_measured_is_not_measured_again(tmp_path):
    """With every cell of the arguments on disk, nothing is started; one that failed would be."""
    path = cpu_config(tmp_path)
    where = tmp_path / "results"
    options = FrontierOptions(str(path), cap=64 << 20, vocabularies=(2048,), modes=("colocated_fused",),
                              results=str(where), timeout=0.0)  # fmt: skip
    with pytest.raises(UserError, match="does not run even with the smallest pair"):
        bench_frontier(options, print)
    arguments = json.loads((where / "results.jsonl").read_text().splitlines()[0])["arguments"]
    kept = Results(where, arguments)
    kept.add({"baseline": True, "bytes": {"colocated": 1 << 28}})
    cell = Cell("colocated_fused", "vocabulary", 2048, OK, {"colocated": 1 << 20}, OK, {"colocated": 1 << 20})
    kept.add(asdict(cell))
    said = []
    assert bench_frontier(options, said.append)["cells"] == [asdict(cell)]
    assert "going on after 2 measurements" in said[0]


def test_a_wider_teacher_keeps_its_heads_size_and_its_proportions():
    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4,
             "head_dim": 64, "vocab_size": 100, "num_hidden_layers": 3}  # fmt: skip
    wide = grown(shape, "teacher", "teacher_width", 768)
    assert (wide["hidden_size"], wide["intermediate_size"]) == (768, 2304)
    assert (wide["num_attention_heads"], wide["num_key_value_heads"]) == (12, 6)
    assert grown(shape, "student", "teacher_width", 768) == shape
    assert grown(shape, "student", "vocabulary", 200)["vocab_size"] == 200
    assert grown(shape, "teacher", "teacher_layers", 5)["num_hidden_layers"] == 5
    with pytest.raises(UserError, match="multiple of .* 64"):
        grown(shape, "teacher", "teacher_width", 700)


def test_a_frontier_with_nothing_to_grow_or_no_room_is_refused(tmp_path):
    path = write_config(tmp_path / "config.yaml", launch__device="cpu")
    with pytest.raises(UserError, match="student.model"):
        bench_frontier(FrontierOptions(str(path), vocabularies=(4096,)), print)
    with pytest.raises(UserError, match="there is no GPU here; add launch.device=cpu"):
        bench_frontier(FrontierOptions(str(cpu_config(tmp_path, launch__device="auto")), vocabularies=(4096,)), print)
    with pytest.raises(UserError, match="give values to grow"):
        bench_frontier(FrontierOptions(str(cpu_config(tmp_path))), print)
    with pytest.raises(UserError, match="--ranks 3: .*multiple of 3"):
        bench_frontier(FrontierOptions(str(cpu_config(tmp_path)), ranks=(3,)), print)
    with pytest.raises(UserError, match="--cap 1MiB"):
        parse_cap("1MiB")
