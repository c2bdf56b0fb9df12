"""Two jobs on two hosts: network namespaces with a wire that is slow, late or cut."""

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))
from transport_network import ADDRESSES, PORT, TwoHosts, unavailable  # noqa: E402
from transport_peers import Peer, expected_digest, listening_addresses  # noqa: E402

pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "available")]
ENDPOINT = f"{ADDRESSES[0]}:{PORT}"


class Hosts:
    """Starts the student on the first host and teachers on the second."""

    def __init__(self, folder, **wire):
        self.network = TwoHosts(**wire)
        self.folder, self.peers = folder, []

    def student(self, **options):
        return self._start("transport_student", ["0", ENDPOINT, "host=yes"], 0, options)

    def teacher(self, number=0, **options):
        return self._start("transport_teacher", [f"teacher {number}", ENDPOINT], 1, options)

    def _start(self, script, arguments, host, options):
        pairs = [f"{key}={value}" for key, value in {"bind": "all", **options}.items()]
        self.peers.append(Peer(script, arguments + pairs, self.folder, {}, True, self.network.prefix(host)))
        return self.peers[-1]

    def close(self):
        for peer in self.peers:
            peer.end()
        self.network.close()


@pytest.fixture
def hosts(tmp_path):
    made = []

    def build(**wire):
        made.append(Hosts(tmp_path, **wire))
        return made[-1]

    yield build
    for each in made:
        each.close()


def assert_undisturbed(record, stop):
    assert record["error"] is None, record["error"]
    assert record["ids"] == list(range(stop))
    assert record["sha256"] == expected_digest(0, stop)


def test_a_teacher_that_started_first_meets_the_student_over_a_late_wire(hosts):
    """10 ms each way; nobody listens on an address that was not asked for."""
    pair = hosts(delay=0.01)
    teacher = pair.teacher(timeout=20)
    time.sleep(1)
    student = pair.student(stop=40, timeout=20, pause=0.02)
    student.await_line("step 5\n", 60)
    assert listening_addresses(pair.peers) == set(ADDRESSES)
    assert_undisturbed(student.result(), 40)
    assert teacher.result()["reason"] == "finished"


def test_a_partition_shorter_than_the_timeout_heals_and_a_longer_one_costs_the_link_only(hosts):
    pair = hosts()
    student = pair.student(stop=120, timeout=4, pause=0.02)
    teacher = pair.teacher(timeout=4)
    student.await_line("step 20\n", 60)
    pair.network.cut()
    time.sleep(1)
    pair.network.heal()
    student.await_line("step 60\n", 60)
    assert "lost" not in student.errors()
    pair.network.cut()
    student.await_line("lost teacher 0", 60)
    pair.network.heal()
    assert_undisturbed(student.result(90), 120)
    assert teacher.result()["reason"] == "finished"
