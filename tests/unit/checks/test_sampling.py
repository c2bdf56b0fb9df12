"""A sampler that is off is caught where the student writes."""

import json

import pytest

from disaggkd_cli.checks import run_checks
from disaggkd_cli.checks import sampling as module
from disaggkd_cli.checks.result import FAIL, PASS
from disaggkd_cli.config.on_policy import OnPolicyConfig
from disaggkd_cli.errors import UserError

pytestmark = pytest.mark.timeout(120)


def sampling(config):
    config.on_policy = OnPolicyConfig(max_new_tokens=8, prompt_tokens=8, top_p=0.95, top_k=40, temperature=0.9)
    return run_checks(config, ["sampling"])[0]


def test_a_sound_sampler_passes(config_of):
    assert sampling(config_of()).outcome == PASS


def test_draws_from_another_distribution_are_caught(config_of, monkeypatch):
    monkeypatch.setattr(
        module, "draw", lambda probabilities, numbers: (probabilities[:1] > 0).nonzero()[:1, 1].repeat(len(numbers))
    )
    assert sampling(config_of()).outcome == FAIL


def test_a_cache_that_loses_the_prompt_is_caught(config_of, monkeypatch):
    generate = module.generate
    monkeypatch.setattr(module, "generate", lambda model, prompts, *rest: generate(model, [prompts[0][-1:]], *rest))
    assert sampling(config_of()).outcome == FAIL


def test_other_runs_have_no_such_check(config_of):
    with pytest.raises(UserError, match="sampling is no check"):
        run_checks(config_of(), ["sampling"])


def test_prompts_alone_are_judged_by_held_out_texts_which_have_answers(config_of, tmp_path):
    asked, held = tmp_path / "asked.jsonl", tmp_path / "held.jsonl"
    asked.write_text("".join(json.dumps({"prompt": f"It was {number}"}) + "\n" for number in range(20)))
    answered = {"prompt": "It was", "completion": " the happiest, wisest, most reasonable end of all her hopes."}
    held.write_text(json.dumps(answered) + "\n")
    config = config_of(data__train=str(asked), data__eval=str(held))
    config.on_policy = OnPolicyConfig(max_new_tokens=8)
    results = {one.name: one for one in run_checks(config, ["teacher", "fused loss", "sampling"])}
    assert [one.outcome for one in results.values()] == [PASS] * 3, results


def test_hidden_states_that_travel_narrower_than_the_head_are_computed_with_in_its_dtype(config_of):
    assert run_checks(config_of(transport__dtype="bfloat16"), ["fused loss"])[0].outcome == PASS
