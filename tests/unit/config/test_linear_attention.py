"""Where flash-linear-attention is not installed, plan and a dry run name it for the models that want it."""

import io
import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import disaggkd_cli.config.linear_attention as module
from disaggkd_cli import jobs, terminal
from disaggkd_cli.cli import app
from disaggkd_cli.config import Config
from disaggkd_cli.config.linear_attention import has_linear_attention, missing_kernels
from disaggkd_cli.planner.command import plan_command
from disaggkd_cli.planner.models.find import PRESETS, load_preset, local_fields
from disaggkd_cli.planner.options import PlanOptions

LINEAR = sorted(path.stem for path in PRESETS.glob("*.json") if "linear" in path.read_text())


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Whether the package is there; it is not, unless a test says so."""
    state = SimpleNamespace(fla=False)
    monkeypatch.setattr(module, "find_spec", lambda name: object() if state.fla else None)
    return state


def qwen(**student):
    config = Config()
    config.teacher.model = "Qwen/Qwen3.5-35B-A3B"
    config.student.model = student.get("model", "Qwen/Qwen3-8B")
    return config


def test_families_are_told_by_their_config():
    assert {"qwen3.5-35b-a3b"} <= {name.lower() for name in LINEAR}
    for name in LINEAR:
        assert has_linear_attention(load_preset(name)["config"]), name
    assert not has_linear_attention(local_fields("Qwen/Qwen3-8B"))
    assert has_linear_attention({"text_config": {"layer_types": ["full_attention", "linear_attention"]}})


def test_one_line_names_the_sides_and_what_to_install(installed):
    (line,) = missing_kernels(qwen(), local_fields)
    assert line.startswith("teacher.model: linear attention") and "pip install 'disaggkd[gpu]'" in line
    (line,) = missing_kernels(qwen(model="Qwen/Qwen3.5-35B-A3B"), local_fields)
    assert line.startswith("teacher.model and the student: ")
    installed.fla = True
    assert missing_kernels(qwen(), local_fields) == []


def test_nothing_is_said_of_models_that_do_without_or_are_not_known():
    config = qwen()
    config.teacher.cache = "recorded"
    assert missing_kernels(config, local_fields) == []
    assert missing_kernels(qwen(), lambda model: None) == []


def test_plan_says_it_once(installed):
    def planned():
        text = io.StringIO()
        plan_command(qwen(), PlanOptions(), terminal.console(file=text, width=200))
        return text.getvalue()

    assert planned().count("disaggkd[gpu]") == 1
    installed.fla = True
    assert "disaggkd[gpu]" not in planned()


@pytest.mark.parametrize(("gpus", "said"), [(["GPU-1"], 1), ([], 0)])
def test_a_dry_run_says_it_where_there_is_a_gpu(tmp_path, monkeypatch, gpus, said):
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    fields = {**load_preset("qwen3.5-35b-a3b")["config"]}
    (teacher / "config.json").write_text(json.dumps(fields))
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    config = tmp_path / "run.yaml"
    config.write_text(
        f"teacher: {{model: {teacher}}}\nstudent: {{model: {teacher}}}\ndata: {{train: {tmp_path}/a.jsonl}}\n"
        f"run_dir: {tmp_path}/run\n"
    )
    monkeypatch.setattr(jobs, "gpus_here", lambda: gpus)
    found = CliRunner().invoke(app, ["run", str(config), "--dry-run"], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    assert found.output.count("disaggkd[gpu]") == said
