"""Writing as modes of `bench step`: what is written, and where a step's time goes."""

import pytest

from disaggkd_cli.bench.on_policy import (
    ON_POLICY_MODES,
    format_writing,
    on_policy_overrides,
    writing_figures,
    written_sequences,
)
from disaggkd_cli.bench.step_report import claims
from disaggkd_cli.config import load
from disaggkd_cli.errors import UserError
from tests.support.runs import write_config

LINE = {"step_seconds": 2.0, "generation_seconds": 0.8, "weights_seconds": 0.1, "stall_seconds": 0.3}


def test_the_modes_differ_in_their_lag_alone(tmp_path):
    config = load(str(write_config(tmp_path / "run.yaml")), ["on_policy.fraction=0.25", "on_policy.max_new_tokens=8"])
    assert [on_policy_overrides(config, mode) for mode in ON_POLICY_MODES] == [["on_policy.lag=0"], ["on_policy.lag=1"]]
    assert written_sequences(config, 5) == [1] * 5
    config.on_policy.fraction = 0.1
    assert sum(written_sequences(config, 5)) == 2, "a tenth of twenty"
    config.on_policy = None
    with pytest.raises(UserError, match="on_policy.fraction"):
        on_policy_overrides(config, ON_POLICY_MODES[0])
    assert written_sequences(config, 5) == []


def test_parts_of_a_step_add_up():
    lines = [{**LINE, "step": 2, "completion_tokens_mean": 6.0}, {**LINE, "step": 3}]
    found = writing_figures(lines, [9, 2, 0])
    assert found["written_tokens_per_second"] == pytest.approx(12 / 4)
    assert found["tokens_per_second_while_writing"] == pytest.approx(12 / 1.6)
    assert found["shares"] == pytest.approx({"writing": 0.4, "weights": 0.05, "judging": 0.15, "training": 0.4})
    shown = format_writing({"on_policy_lag_1": {"tokens_per_second": 100.0, "writing": found}, "colocated_full": {}})
    assert len(shown) == 3 and shown[1].endswith("writing 40%, weights 5%, judging 15%, training 40%")
    assert format_writing({"colocated_full": {}}) == []


def test_another_lag_writes_other_texts_so_losses_are_not_compared():
    one = {"tokens_per_second_spread": [9, 11], "tokens_per_second": 10.0, "rounds": [9, 11], "losses": [1.0]}
    faster = {**one, "tokens_per_second_spread": [12, 14], "tokens_per_second": 13.0, "losses": [2.0]}
    (claim,) = claims(dict(zip(ON_POLICY_MODES, (one, faster), strict=True)))
    assert claim == {"claim": "faster: on_policy_lag_1 than on_policy_lag_0", "holds": True, "figures": "1.30 x"}
