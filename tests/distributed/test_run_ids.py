"""Headers of another run end the link; the run itself goes on with whoever belongs to it."""

import socket
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from disaggkd_cli.training.build import agreed_run_id
from tests.support.runs import finish, metrics, start, status, weights_sha256

# A teacher that stamps its headers as a run without an id would, and takes only such headers for its own.
STRANGER = """
import sys
from disaggkd_cli.transport import link
link.run_number = lambda run_id: 0
from disaggkd_cli.__main__ import main
sys.argv = ["disaggkd", *sys.argv[1:]]
sys.exit(main())
"""


def test_a_teacher_whose_headers_belong_to_another_run_is_dropped(reference_config, reference, tmp_path):
    run = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        rendezvous = f"launch.rendezvous=127.0.0.1:{probe.getsockname()[1]}"
    student = start(["student", str(reference_config), f"run_dir={run}", rendezvous])
    stranger = subprocess.Popen(
        [sys.executable, "-c", STRANGER, "teacher", str(reference_config), rendezvous],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    honest = None
    try:
        log, deadline = run / "logs" / "student_0.log", time.monotonic() + 60
        while not log.exists() or "teacher 0" not in log.read_text().split("waiting for a teacher", 1)[-1]:
            assert time.monotonic() < deadline, log.read_text() if log.exists() else "no log"
            time.sleep(0.2)
        stranger.kill()
        heard, _ = stranger.communicate()
        honest = start(["teacher", str(reference_config), rendezvous])
        code, output = finish(student, 120)
        assert code == 0, output
        finish(honest, 60)
        assert "a header of another run" in heard + log.read_text()
    finally:
        for process in (student, stranger, honest):
            if process is not None and process.poll() is None:
                process.kill()
    assert weights_sha256(run) == weights_sha256(reference)


@pytest.mark.slow
def test_a_teacher_that_computes_otherwise_serves_only_where_that_is_said(reference_config, tmp_path):
    run = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        rendezvous = f"launch.rendezvous=127.0.0.1:{probe.getsockname()[1]}"
    slowly = {"DISAGGKD_TESTING": "1", "DISAGGKD_FAULT": "student 0.before_commit:sleep:0.5"}
    jobs = [
        start(
            ["student", str(reference_config), f"run_dir={run}", rendezvous, "transport.mixed_teachers=true"], **slowly
        )
    ]
    jobs += [
        start(["teacher", str(reference_config), rendezvous, f"teacher.dtype={dtype}"])
        for dtype in ("float32", "bfloat16")
    ]
    ended = [finish(job) for job in jobs]
    assert [code for code, _ in ended] == [0, 0, 0], ended
    assert "this run is not reproducible bit for bit" in (run / "logs" / "student_0.log").read_text()
    assert len(status(run)["other_bits"]) == 1
    answered = [line["teachers"] for line in metrics(run) if "loss" in line][-1]
    assert [name for name, known in answered.items() if known["other_bits"]] == status(run)["other_bits"]


def test_every_start_of_a_student_has_an_id_of_its_own():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        first, second = agreed_run_id(), agreed_run_id()
    finally:
        dist.destroy_process_group()
    assert first != second and len(first) == len(second) == 16
