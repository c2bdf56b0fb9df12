"""Measurements on disk: gone on with, begun anew, torn lines left out, other arguments refused."""

import json

import pytest

from disaggkd_cli.bench.results import Results, default_root
from disaggkd_cli.errors import UserError

ARGUMENTS = {"config": "text", "steps": 4, "modes": ("a", "b")}


def test_a_bench_that_was_cut_off_finds_what_it_measured(tmp_path):
    said = []
    first = Results(tmp_path / "new", ARGUMENTS, log=said.append)
    kept = first.add({"mode": "a", "round": 1, "rates": (1.5, 2.0)})
    assert kept["rates"] == [1.5, 2.0] and not said
    again = Results(tmp_path / "new", ARGUMENTS, log=said.append)
    assert again.find(mode="a", round=1) == kept
    assert again.find(mode="a", round=2) is None
    assert len(said) == 1 and "after 1 measurements" in said[0] and "--fresh" in said[0]


def test_a_line_cut_off_in_mid_write_is_measured_again(tmp_path):
    first = Results(tmp_path, ARGUMENTS)
    first.add({"round": 1})
    first.add({"round": 2})
    text = first.path.read_text()
    first.path.write_text(text[: text.index('"round": 2') + 4])
    again = Results(tmp_path, ARGUMENTS)
    assert again.find(round=1) and again.find(round=2) is None
    again.add({"round": 2})
    assert Results(tmp_path, ARGUMENTS).find(round=2)


@pytest.mark.parametrize("how", ["finished", "fresh"])
def test_a_finished_bench_is_measured_anew_and_the_old_figures_stay_aside(tmp_path, how):
    first = Results(tmp_path, ARGUMENTS)
    first.add({"round": 1})
    if how == "finished":
        first.finish()
    again = Results(tmp_path, ARGUMENTS, fresh=how == "fresh")
    assert again.find(round=1) is None
    old = (tmp_path / "results.previous.jsonl").read_text().splitlines()
    assert json.loads(old[1]) == {"round": 1}


def test_measurements_of_other_arguments_are_not_mixed_in(tmp_path):
    Results(tmp_path, ARGUMENTS).add({"round": 1})
    with pytest.raises(UserError, match=r"--results .*other arguments \(steps\)"):
        Results(tmp_path, {**ARGUMENTS, "steps": 5})
    assert Results(tmp_path, {**ARGUMENTS, "steps": 5}, fresh=True).find(round=1) is None


def test_a_directory_that_cannot_be_written_is_the_users(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--results"):
        Results(tmp_path / "file" / "below", ARGUMENTS)


def test_each_set_of_arguments_has_a_directory_of_its_own():
    one, other = (default_root("runs/pair", "step", {"steps": steps}) for steps in (4, 5))
    assert one != other and one.parent == other.parent and str(one).startswith("runs/pair-bench/step-")
    assert one == default_root("runs/pair", "step", {"steps": 4})
