"""Two student ranks whose requests share forwards learn what one rank alone learns."""

import re

import pytest

from tests.support.runs import disaggkd, losses

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]  # by default, the exchange's unit tests merge over links


def test_requests_of_two_ranks_share_forwards_and_the_losses_stay(reference_config, reference, tmp_path):
    run = tmp_path / "run"
    code, output = disaggkd(
        "run", str(reference_config), f"run_dir={run}", "student.ranks=2", "train.micro_batch_sequences=2",
        "teacher.merge_tokens=100000", DISAGGKD_TESTING="1", DISAGGKD_FAULT="teacher 0.forward:sleep:0.05",
    )  # fmt: skip
    assert code == 0, output
    log = (run / "logs" / "teacher_0.log").read_text()
    assert "teacher.merge_tokens=100000: requests that share a forward keep every bit" in log
    ((requests, forwards),) = re.findall(r"answered (\d+) requests \(\d+ rows\) in (\d+) forwards", log)
    assert int(requests) >= 2 * 20 and int(forwards) < int(requests)
    assert losses(run) == pytest.approx(losses(reference), rel=1e-6)
