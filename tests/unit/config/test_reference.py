"""The reference of keys is the schema's own words."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from disaggkd_cli.cli import app
from disaggkd_cli.config import reference as module
from disaggkd_cli.config.load import known_keys
from disaggkd_cli.config.reference import as_markdown, complete, explain, reference
from disaggkd_cli.config.schema import CHOICES
from disaggkd_cli.errors import UserError


def test_every_key_has_a_text_and_a_version():
    keys = reference()
    assert list(keys) == known_keys()
    assert not [name for name, key in keys.items() if not key.text or not key.since]


def test_choices_are_those_that_the_loader_checks():
    assert all(reference()[name].choices == tuple(words) for name, words in CHOICES.items())


def test_explain_says_default_and_choices():
    text = explain("loss.divergence")
    assert "default: forward_kl" in text and "total_variation" in text


def test_explain_a_section_lists_its_keys():
    assert "train.warmup_steps" in explain("train")


def test_a_typo_names_the_key():
    with pytest.raises(UserError, match="did you mean train.warmup_steps"):
        explain("warmup_steps")
    with pytest.raises(UserError, match="loss.divergence"):
        explain("loss.divergense")


def test_completion_offers_sections_then_keys_then_values():
    assert ("train.", "The optimisation") in complete("tr")
    assert [text for text, _ in complete("train.warm")] == ["train.warmup_steps="]
    assert [text for text, _ in complete("mode=c")] == ["mode=colocated"]
    assert [text for text, _ in complete("data.streaming=")] == ["data.streaming=true", "data.streaming=false"]


def test_the_page_has_every_key_once():
    page = as_markdown()
    for name, key in reference().items():
        if key.type != "section":
            assert page.count(f"| `{name}` |") == 1


def test_a_released_key_that_is_gone_stays_out_of_the_reference_and_a_new_one_is_this_version():
    released = json.loads((Path(module.__file__).parent / "released_keys.json").read_text())
    first = set(released["0.1.0"])
    keys = reference()
    assert all(key.since == "0.1.0" for name, key in keys.items() if name in first)
    assert all(key.since != "0.1.0" for name, key in keys.items() if name not in first)


def test_the_command_prints_it():
    found = CliRunner().invoke(app, ["explain", "train.steps"])
    assert found.exit_code == 0 and "Optimizer steps" in found.output


def test_bash_takes_an_override_apart_at_its_sign():
    from disaggkd_cli.cli import _complete_override

    assert ("reverse_kl", "") in _complete_override(["run", "a.yaml", "loss.divergence"], "=")
    assert _complete_override(["a.yaml", "loss.divergence", "="], "rev") == [("reverse_kl", "")]
    assert _complete_override(["a.yaml"], "loss.divergence=rev") == [("loss.divergence=reverse_kl", "")]
    assert ("train.steps=", "Optimizer steps") in [(key, text[:15]) for key, text in _complete_override([], "train.")]


def test_a_section_that_is_the_only_choice_opens():
    names = [name for name, _ in complete("tra")]
    assert "train." in names and "transport." in names
    assert "transport.ring_depth=" in [name for name, _ in complete("transp")]
