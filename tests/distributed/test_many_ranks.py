"""Many ranks of one role on one machine, and a link that dies in each layout."""

import re

import pytest

from tests.distributed.test_run_faults import run_with_faults
from tests.support.runs import descendants, losses, weights_sha256

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def joined(output: str) -> set[str]:
    return set(re.findall(r"(teacher \d+) joined", output))


def test_one_student_and_eight_teachers_each_of_which_dies(reference_config, reference, tmp_path):
    run = tmp_path / "run"
    faults = ",".join(f"teacher {number}.forward:sleep:0.4,teacher {number}.payload:kill@2" for number in range(8))
    output = run_with_faults(reference_config, run, faults, "teacher.replicas=8", "launch.threads=1")
    assert len(joined(output)) >= 2
    assert "was killed by SIGKILL; starting it again" in output
    assert weights_sha256(run) == weights_sha256(reference)
    assert losses(run) == losses(reference)
    assert descendants(str(run)) == []


def test_four_students_and_two_teachers_one_of_whose_links_dies(reference_config, reference, tmp_path):
    run = tmp_path / "run"
    output = run_with_faults(
        reference_config, run, "teacher 0.ready:hash@3,teacher 1.forward:sleep:0.05", "student.ranks=4",
        "train.micro_batch_sequences=1", "teacher.replicas=2", "launch.threads=1",
    )  # fmt: skip
    log = "".join(path.read_text() for path in (run / "logs").glob("student_*.log"))
    assert "announces token hash" in log
    assert joined(output + log) == {"teacher 0", "teacher 1"}
    assert losses(run) == pytest.approx(losses(reference), rel=1e-5)
    assert descendants(str(run)) == []
