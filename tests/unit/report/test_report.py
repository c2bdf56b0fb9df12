"""The page of `disaggkd report`, made of written run directories: finished, going, failed, empty and damaged ones."""

import json
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from disaggkd_cli.errors import UserError
from disaggkd_cli.report.command import report_command
from disaggkd_cli.report.events import kind_of, read_events
from disaggkd_cli.report.read import read_runs
from disaggkd_cli.report.render import render
from disaggkd_cli.report.summary import differing_keys, state_of
from disaggkd_cli.training.run_directory import RunDirectory, write_environment
from disaggkd_cli.training.samples import ON_POLICY, Sample, SamplesTable
from tests.support.runs import TINY_TEACHER, write_config


class Balanced(HTMLParser):
    """Fails on a closing tag that does not match, and collects what a page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.loads += [value for name, value in attributes if name in ("src", "href", "action", "data")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def written_run(root: Path, steps: int, *, state: str = "finished", slope: float = 0.01, **changes) -> Path:
    root.mkdir(parents=True)
    write_config(root / "config.yaml", **changes)
    (root / "logs").mkdir()
    lines = [{"step": 0, "eval_lm_loss": 6.5, "eval_perplexity": 665.1, "eval_kd": 2.0, "eval_top1_agreement": 0.1}]
    for step in range(1, steps + 1):
        teachers = {
            "teacher 0 #0": {"requests": step, "rows": 192 * step, "received_bytes": 98304 * step, "idle_share": 0.5,
                             "linked": step < 10},
        }  # fmt: skip
        lines.append({
            "step": step, "loss": 2.0 - slope * step, "kd": 2.0 - slope * step, "ce": 6.0,
            "top1_agreement": 0.01 * step, "learning_rate": 1e-3, "grad_norm": 1.0,
            "supervised_tokens": 192, "tokens_per_second": 1920.0,
            "step_seconds": 0.1, "stall_seconds": 0.025, "ring_fill": 0.5, "received_bytes": 98304,
            "peak_memory_bytes": 400 << 20, "teachers": teachers,
        })  # fmt: skip
    (root / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    status = {"state": state, "exit_code": 0, "reason": "said so", "last_step": steps, "resumable": state == "stopped"}
    (root / "status.json").write_text(json.dumps(status))
    return root


def page(*paths: Path) -> str:
    text = render(read_runs([str(path) for path in paths]))
    parser = Balanced(text)
    assert not parser.open and not parser.loads
    assert "<script" not in text and "http" not in re.sub(r'xmlns="[^"]*"', "", text)
    return text


def test_one_run_shows_every_part(tmp_path):
    text = page(written_run(tmp_path / "run", 20))
    for part in ("Training loss", "KD divergence", "Top-1 agreement", "Learning rate", "Seconds of a step", "Ring fill",
                 "Teachers", "Memory, against the plan", "Links and ranks", "student · ", "teacher · "):  # fmt: skip
        assert part in text, part
    assert "stall</dt><dd>25.0%" in text
    assert "1.9900 → 1.8000" in text
    assert "the teacher's own</dt>" not in text and "Load-balancing" not in text


def test_the_teachers_own_loss_and_the_routers_are_shown_where_they_are_recorded(tmp_path):
    root = written_run(tmp_path / "run", 3)
    lines = [json.loads(text) for text in (root / "metrics.jsonl").read_text().splitlines()]
    lines[0] |= {"eval_teacher_lm_loss": 3.2104, "eval_teacher_perplexity": 24.8}
    for line in lines[1:]:
        line["router_aux"] = 1.01
    (root / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = page(root)
    assert "the teacher's own</dt><dd>3.2104" in text
    assert "Load-balancing loss of the routers" in text and "Dashed: the teacher" in text


def test_a_teachers_row_ends_where_its_link_died(tmp_path):
    text = page(written_run(tmp_path / "run", 20))
    cells = re.findall(r"<title>teacher 0 #0, steps (\d+)-\d+: idle 50%</title>", text)
    assert [int(cell) for cell in cells] == list(range(1, 10))


def test_runs_are_overlaid_and_compared(tmp_path):
    first = written_run(tmp_path / "first", 20)
    second = written_run(tmp_path / "second", 12, slope=0.02, mode="colocated", loss__implementation="full")
    text = page(first, second)
    assert "Beside first" in text and "<td>12</td><td>0.12</td>" in text
    assert "colocated, full logits" in text and "teacher&#x27;s forward" in text.replace("'", "&#x27;")
    assert [key for key, _ in differing_keys(read_runs([str(first), str(second)]))] == ["mode", "loss.implementation"]


def test_a_run_that_goes_on_is_read_as_far_as_it_got(tmp_path):
    root = written_run(tmp_path / "run", 6, state="running")
    with (root / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 1.')
    text = page(root)
    assert "step 6 of 20" in text and "of training left" in text


@pytest.mark.parametrize("left", ["config only", "no steps", "one step", "status damaged"])
def test_a_run_that_has_left_little_makes_a_page(tmp_path, left):
    root = written_run(tmp_path / "run", {"no steps": 0, "one step": 1}.get(left, 5))
    if left == "config only":
        for name in ("metrics.jsonl", "status.json"):
            (root / name).unlink()
    if left == "status damaged":
        (root / "status.json").write_text("{")
    text = page(root)
    assert ("not started yet" in text) == (left in ("config only", "status damaged"))
    assert ("nothing recorded yet" in text) == (left in ("config only", "no steps"))


def test_a_run_whose_models_are_gone_says_why_it_has_no_plan(tmp_path):
    text = page(written_run(tmp_path / "run", 5, teacher__model=str(tmp_path / "moved")))
    assert "No plan: " in text and "moved" in text


def test_a_config_that_cannot_be_read_hides_nothing_else(tmp_path):
    root = written_run(tmp_path / "run", 5)
    (root / "config.yaml").write_text("mode: [")
    text = page(root)
    assert "config unreadable" in text and "Training loss" in text


def test_how_a_run_ended_is_said(tmp_path):
    stopped, failed = (read_runs([str(written_run(tmp_path / s, 5, state=s))])[0] for s in ("stopped", "failed"))
    assert state_of(stopped) == ("stopped", "no", "said so. Go on with --resume auto.")
    assert state_of(failed)[0] == "failed"


def test_a_run_that_went_silent_is_not_called_running(tmp_path):
    root = written_run(tmp_path / "run", 5, state="running")
    os.utime(root / "metrics.jsonl", (1, 1))
    assert state_of(read_runs([str(root)])[0])[0] == "running?"


def test_each_roles_fullest_rank_is_set_beside_its_plan(tmp_path):
    root = written_run(tmp_path / "run", 5)
    for rank, start, peak in (("student 0", 300, 420), ("teacher 0", 250, 300), ("teacher 1", 250, 310)):
        record = {"rank": rank, "device": "cpu", "start_bytes": start << 20, "peak_bytes": peak << 20}
        (root / "logs" / f"{rank.replace(' ', '_')}.memory.json").write_text(json.dumps(record))
    text = page(root)
    assert "<dt>peak of a student rank</dt><dd>420.00 MiB</dd>" in text
    assert "<dt>peak of a teacher rank</dt><dd>310.00 MiB</dd>" in text
    assert "fullest teacher rank: 60.00 MiB (310.00 MiB with 250.00 MiB at its start)" in text
    assert "less what it took when its libraries were imported" in text


def test_a_colocated_ranks_record_is_called_by_its_role(tmp_path):
    root = written_run(tmp_path / "run", 5, mode="colocated")
    record = {"rank": "student 0", "device": "cuda:0", "start_bytes": 300 << 20, "peak_bytes": 420 << 20}
    (root / "logs" / "student_0.memory.json").write_text(json.dumps(record))
    assert "fullest colocated rank: 420.00 MiB (allocated on the GPU)" in page(root)


def test_source_positions_of_libraries_are_left_out(tmp_path):
    root = written_run(tmp_path / "run", 5)
    line = "2026-01-02 03:04:05,006 [student 0] lost teacher 0: gone: [/__w/gloo/pair.cc:553] Connection closed\n"
    (root / "logs" / "student_0.log").write_text(line)
    assert "lost teacher 0: gone: Connection closed" in page(root)


def test_names_and_logs_are_shown_as_text(tmp_path):
    root = written_run(tmp_path / "<b>run", 5)
    line = "2026-01-02 03:04:05,006 [student 0] lost teacher 0: <script>alert(1)</script>; 0 linked\n"
    (root / "logs" / "student_0.log").write_text(line)
    text = page(root)
    assert "&lt;b&gt;run" in text and "&lt;script&gt;" in text


def test_runs_of_one_name_are_told_apart(tmp_path):
    runs = read_runs([str(written_run(tmp_path / side / "run", 2)) for side in ("a", "b")])
    assert [run.name for run in runs] == ["a/run", "b/run"]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("teacher 1 joined; 2 linked", "joined"),
        ("teacher 1 joined again; 2 linked", "joined"),
        ("lost teacher 0: timeout; 1 linked", "lost"),
        ("refused teacher 0: another vocabulary; 0 linked", "refused"),
        ("teacher 0: process 12, 1 threads, device cpu", "started"),
        ("resuming after step 7 from x", "resumed"),
        ("finished: answered 50 requests (9599 rows), idle 78%", "ended"),
        ("bad reply, asked for again: hash", "bad reply"),
        ("student: 656,000 parameters, 656,000 of them trained", None),
    ],
)
def test_log_lines_have_kinds(line, kind):
    assert kind_of(line) == kind


def test_events_of_all_ranks_are_in_order_of_time(tmp_path):
    (tmp_path / "student_0.log").write_text("2026-01-02 03:04:06,000 [student 0] teacher 0 joined; 1 linked\nnoise\n")
    (tmp_path / "teacher_0.log").write_text("2026-01-02 03:04:05,000 [teacher 0] teacher 0: process 1, cpu\n")
    found = [(one.rank, one.kind) for one in read_events(tmp_path)]
    assert found == [("teacher 0", "started"), ("student 0", "joined")]


def test_what_is_no_run_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match="run"):
            read_runs([str(path)])


def test_the_command_writes_one_file(tmp_path, capsys):
    root = written_run(tmp_path / "run", 5)
    assert report_command([str(root)], str(tmp_path / "page.html")) == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["page.html"]
    assert "run: finished, 5 steps recorded" in capsys.readouterr().out
    with pytest.raises(UserError, match="--output"):
        report_command([str(root)], str(tmp_path / "missing" / "page.html"))


def test_samples_are_shown_the_newest_first(tmp_path):
    run = written_run(tmp_path / "run", 20)
    assert "<h2>Samples</h2>" not in render(read_runs([str(run)]))
    table = SamplesTable(run / "samples.jsonl", 0)
    for step in (0, 8):
        table.write([Sample(step, ON_POLICY, "It <was>", "student", f"a dark\nnight {step}")])
    page = render(read_runs([str(run)]))
    Balanced(page)
    assert "1 earlier texts" in page and "It &lt;was&gt;" in page
    assert page.index("a dark<br>night 8") < page.index("a dark<br>night 0")


def with_lines(root: Path, change) -> Path:
    lines = [json.loads(text) for text in (root / "metrics.jsonl").read_text().splitlines()]
    (root / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in change(lines)))
    return root


def test_the_student_stands_beside_its_teacher_and_perplexity_has_a_curve(tmp_path):
    later = [
        {"step": step, "eval_lm_loss": 4.5, "eval_perplexity": 90.0, "eval_kd": 0.7, "eval_top1_agreement": 0.5,
         "eval_teacher_lm_loss": 4.1, "eval_teacher_perplexity": 60.3}
        for step in (3, 6)
    ]  # fmt: skip
    text = page(with_lines(written_run(tmp_path / "run", 6), lambda lines: lines + later))
    assert "<th>student after step 0</th><th>student after step 6</th>" in text
    assert "<td>held-out perplexity</td><td>60.3</td><td>665.1</td><td>90.0</td>" in text
    assert "<td>same best token as the teacher</td><td></td><td>10.0%</td><td>50.0%</td>" in text
    assert "Too high to be drawn: run 665.1 after step 0." in text


def test_what_an_on_policy_student_wrote_has_its_curves(tmp_path):
    def written(lines):
        figures = {"on_policy_kd": 0.9, "data_kd": 0.4, "completion_tokens_mean": 31.5, "completion_cut_share": 0.25,
                   "sampled_entropy": 2.5, "generation_seconds": 0.2, "weights_seconds": 0.0}  # fmt: skip
        return [line | (figures if "loss" in line else {"eval_on_policy_kd": 1.1}) for line in lines]

    assert "What the student writes" not in page(written_run(tmp_path / "given", 4))
    text = page(with_lines(written_run(tmp_path / "run", 4), written))
    for part in ("What the student writes", "Tokens of a completion", "Entropy of what was drawn from"):
        assert part in text
    assert "run: 1.1 at 0" in text


@pytest.mark.parametrize("recorded", [True, False])
def test_the_plan_reads_paths_as_the_run_did_and_never_as_they_lead_from_here(tmp_path, monkeypatch, recorded):
    there, elsewhere = tmp_path / "there", tmp_path / "elsewhere"
    shutil.copytree(TINY_TEACHER, there / "models" / "tiny")
    root = written_run(there / "runs" / "one", 5, teacher__model="models/tiny", run_dir="runs/one")
    if recorded:
        root = root.rename(there / "moved")
        (root / "environment.json").write_text(json.dumps({"working_directory": str(there)}))
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    text = page(root)
    assert "No plan" not in text and "teacher · " in text and Path.cwd() == elsewhere
    shutil.move(there / "models", elsewhere / "models")
    assert "No plan: " in page(root)


def test_a_run_records_where_relative_paths_are_meant_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_environment(RunDirectory(tmp_path), {}, {})
    assert json.loads((tmp_path / "environment.json").read_text())["working_directory"] == str(tmp_path)


def test_values_of_any_length_stay_within_the_page(tmp_path):
    long = [written_run(tmp_path / name, 4, data__train=f"/texts/{name * 90}.txt") for name in "ab"]
    assert '<table class="differs">' in page(*long)


def test_what_both_wrote_to_one_prompt_stands_in_one_card(tmp_path):
    run = written_run(tmp_path / "run", 4)
    SamplesTable(run / "samples.jsonl", 0).write([Sample(4, "t", "Once", who, f"by {who}") for who in ("a", "b")])
    assert "<p>Once</p><dl><dt>a</dt><dd>by a</dd><dt>b</dt><dd>by b</dd></dl>" in page(run)
