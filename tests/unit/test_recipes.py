"""`disaggkd init`: every recipe is written as it is shipped, loads, and passes a dry run on models that are there."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from disaggkd_cli.cli import app
from disaggkd_cli.errors import UserError
from disaggkd_cli.recipes import recipes, write_recipe

TINY = Path(__file__).parents[1] / "assets" / "tiny-austen"


@pytest.mark.parametrize("name", sorted(recipes()))
def test_a_recipe_is_written_and_passes_a_dry_run(name, tmp_path, monkeypatch):
    target = tmp_path / f"{name}.yaml"
    write_recipe(name, target)
    text = tmp_path / "texts.txt"
    text.write_text("It is a truth universally acknowledged. " * 50)
    monkeypatch.chdir(tmp_path)
    overrides = [f"teacher.model={TINY}", f"data.train={text}", "data.eval=0.02", "launch.bind=loopback"]
    overrides.append("teacher.ranks_per_replica=1")  # the tiny model has few layers to be cut into stages
    if "from_teacher" not in target.read_text():
        overrides.append(f"student.model={TINY}")
    if "cache:" in target.read_text():
        overrides.append("teacher.cache=null")
    if "parallelism: pipeline" in target.read_text():
        # The stand-in has four layers, and a stage takes one at least.
        overrides.append("teacher.ranks_per_replica=4")
    found = CliRunner().invoke(app, ["run", str(target), *overrides, "--dry-run"], catch_exceptions=False)
    assert found.exit_code == 0
    assert "student 0" in found.output


def test_every_recipe_says_what_it_is_for():
    purposes = [recipe.purpose for recipe in recipes().values()]
    assert all(10 < len(purpose) < 140 for purpose in purposes)
    assert len(set(purposes)) == len(purposes)


def test_the_recipes_people_ask_for_are_there():
    wanted = {
        "quickstart",
        "own-chats",
        "own-text",
        "colocated-one-gpu",
        "one-node",
        "two-jobs",
        "slurm",
        "lora",
        "recorded",
    }
    assert wanted <= set(recipes())


def test_a_typo_is_met_with_the_nearest_name():
    with pytest.raises(UserError, match="did you mean own-chats"):
        write_recipe("own-chat", Path("unused.yaml"))


def test_a_file_that_is_there_stays(tmp_path):
    target = tmp_path / "mine.yaml"
    target.write_text("mine")
    with pytest.raises(UserError, match="stays as it is"):
        write_recipe("own-text", target)
    assert target.read_text() == "mine"


def test_list_names_every_recipe():
    output = CliRunner().invoke(app, ["init", "--list"]).output
    assert all(name in output for name in recipes())
