"""Nobody but this machine can reach a bare run: every socket that it listens on is bound to loopback."""

import ipaddress
import sys
import time
from pathlib import Path

import pytest

from tests.support.runs import descendants, finish, process_ids, start

sys.path.insert(0, str(Path(__file__).parent / "support"))
from transport_peers import listening_addresses_of  # noqa: E402

pytestmark = pytest.mark.timeout(240)


def steps_done(run):
    path = run / "metrics.jsonl"
    return path.read_text().count('"loss"') if path.exists() else 0


def test_no_process_of_a_bare_run_listens_off_loopback(reference_config, tmp_path):
    """Two student ranks and a teacher, read while they train: the store, the links, and the students' own group."""
    run = tmp_path / "run"
    job = start(
        ["run", str(reference_config), f"run_dir={run}", "student.ranks=2", "train.steps=4", "train.eval_every=0"],
        DISAGGKD_TESTING="1", DISAGGKD_FAULT="teacher 0.forward:sleep:0.3",
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 90
        while steps_done(run) < 1:
            assert job.poll() is None and time.monotonic() < deadline, "no first step"
            time.sleep(0.05)
        found = {pid: listening_addresses_of(pid) for pid in descendants(str(run))}
        students, teachers = process_ids("student", str(run)), process_ids("teacher", str(run))
        assert job.poll() is None, "the run ended before it was looked at"
        code, output = finish(job)
        assert code == 0, output
    finally:
        job.kill()
    assert len(students) == 2 and len(teachers) == 1 and set(found) == {job.pid, *students, *teachers}
    assert all(found[pid] for pid in [*students, *teachers]), f"a rank without any listener: {found}"
    addresses = set().union(*found.values())
    assert all(ipaddress.ip_address(address).is_loopback for address in addresses), addresses
