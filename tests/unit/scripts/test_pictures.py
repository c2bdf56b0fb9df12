"""The pictures of the README: the one in docs/ is what `plan` says, and a recorded run becomes a picture."""

import importlib.util
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from disaggkd_cli.config import load
from disaggkd_cli.planner.inputs import workload_of
from disaggkd_cli.planner.plan import make_plan
from tests.support.runs import write_config

SCRIPTS = Path(__file__).parents[3] / "scripts"


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_memory_chart_is_what_plan_counts():
    chart = script("memory_chart")
    drawn = chart.picture(make_plan(workload_of(load(chart.CONFIG)), with_knobs=False))
    assert chart.PICTURE.read_text(encoding="utf-8") == drawn, "run `python scripts/memory_chart.py`"
    ElementTree.fromstring(drawn)


def recorded_run(root: Path, mode: str) -> Path:
    """Two steps of one second: half a second of waiting (colocated: of the teacher), then training."""
    (root / "logs").mkdir(parents=True)
    write_config(root / "config.yaml", mode=mode)
    student, teacher = [], []
    for step in range(2):
        student += [("ask", step, step), ("wait", step, step + 0.5), ("train", step + 0.5, step + 0.9)]
        student.append(("update", step + 0.9, step + 1.0))
        teacher.append(("forward", step + 0.1, step + 0.4))
    for name, spans in (("student_0", student), ("teacher_0", teacher)):
        if name == "student_0" or mode == "disaggregated":
            lines = [{"what": w, "start": 100 + s, "end": 100 + e, "request": int(s)} for w, s, e in spans]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (root / "logs" / f"{name}.timeline.jsonl").write_text(text)
    return root


def test_runs_become_panels_with_their_shares(tmp_path):
    overlap = script("overlap_picture")
    panels = [overlap.Panel(recorded_run(tmp_path / mode, mode), 1, 2) for mode in ("colocated", "disaggregated")]
    assert "2 steps in 2.00 s (teacher 50% of it)" in panels[0].title(2)
    assert "teacher busy 30%, student waits 50%" in panels[1].title(2)
    tree = ElementTree.fromstring(overlap.picture(panels, 2))
    titles = [one.text for one in tree.iter("{http://www.w3.org/2000/svg}title")]
    assert titles.count("forward, request 1: 500 ms") == 1 and titles.count("forward, request 1: 300 ms") == 1


def test_a_run_with_too_few_steps_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="2 steps are recorded, 9 are asked for"):
        script("overlap_picture").Panel(recorded_run(tmp_path / "run", "disaggregated"), 8, 9)
