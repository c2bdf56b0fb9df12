"""The launch scripts start real ranks, pass signals on and ask for another turn; stand-ins play SLURM's programs."""

import random
import shutil
import signal
import subprocess

import pytest

from tests.support.runs import losses, metrics, run_to_end, status, write_config
from tests.unit.scripts.cluster import PROGRAMS, ROOT, SCRIPTS, Cluster, wait_until

SHELL = sorted([*SCRIPTS.rglob("*.sh"), *SCRIPTS.rglob("*.sbatch")])
STEPS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("launch") / "a folder with spaces"


@pytest.fixture(scope="module")
def cluster(folder):
    made = Cluster(folder)
    yield made
    made.end()


@pytest.fixture(scope="module")
def config(cluster, folder):
    return write_config(folder / "the run.yaml", train__steps=STEPS, train__save_every=20, train__eval_every=0)


@pytest.fixture(scope="module")
def reference(config, folder):
    """The losses of the same run without a cluster."""
    return losses(run_to_end(config, folder / "reference"))


@pytest.fixture
def port():
    return str(random.randrange(15000, 30000))


@pytest.mark.parametrize("path", SHELL, ids=lambda path: str(path.relative_to(SCRIPTS)))
def test_the_scripts_are_sound_bash(path):
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    text = path.read_text()
    if "functions" not in path.name:
        assert "\nset -euo pipefail\n" in text
        assert text.startswith("#!/usr/bin/env bash\n")
        assert path.stat().st_mode & 0o111, "must be executable"
    assert max(map(len, text.splitlines())) <= 120
    checker = shutil.which("shellcheck")
    if checker:
        done = subprocess.run([checker, "-e", "SC1091,SC2034", str(path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def reached(run_dir, step):
    return (run_dir / "metrics.jsonl").exists() and len(metrics(run_dir)) >= step


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_job_saves_in_time_and_is_requeued(cluster, config, folder, port):
    run_dir = folder / "one job"
    script = SCRIPTS / "slurm" / "one_job.sbatch"
    job = cluster.submit(script, config, f"run_dir={run_dir}", tasks="2", MASTER_PORT=port)
    wait_until(lambda: reached(run_dir, 3), 150, lambda: cluster.output(job))
    cluster.signal(job, signal.SIGUSR1)
    assert cluster.wait(job) == 75, cluster.output(job)
    assert f"scontrol requeue {job}" in cluster.calls()
    assert (status(run_dir)["state"], status(run_dir)["resumable"]) == ("stopped", True)
    assert 3 <= status(run_dir)["last_step"] < STEPS
    assert not list(run_dir.glob(".started*"))


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_requeued_job_goes_on_and_is_not_requeued_for_ever(cluster, config, folder, reference, port):
    run_dir = folder / "requeued"
    arguments = [SCRIPTS / "slurm" / "one_job.sbatch", config, f"run_dir={run_dir}"]
    job = cluster.submit(*arguments, "train.stop_at=4", tasks="2", MASTER_PORT=port)
    assert cluster.wait(job) == 75, cluster.output(job)
    again = cluster.submit("--restart-count=1", *arguments, "train.stop_at=7", tasks="2",
                           MASTER_PORT=str(int(port) + 1), MAX_REQUEUES="1")  # fmt: skip
    assert cluster.wait(again) == 75, cluster.output(again)
    assert "resuming after step 4" in cluster.output(again)
    assert losses(run_dir) == reference[:7]
    assert "not requeued: this job had its 1 turns already (MAX_REQUEUES)" in cluster.output(again)
    assert [call for call in cluster.calls() if call == f"scontrol requeue {again}"] == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_jobs_find_each_other_also_after_the_student_was_requeued(cluster, config, folder, reference):
    run_dir = folder / "two jobs"
    submit = SCRIPTS / "slurm" / "submit_two_jobs.sh"
    done = cluster.call(submit, config, f"run_dir={run_dir}", TEACHER_JOBS="1", SLURM_STUB_TASKS="1",
                        TEACHER_OPTIONS="--partition=old --account=x")  # fmt: skip
    student, teachers = (int(word.rstrip(";")) for word in done.stderr.split() if word.rstrip(";").isdigit())
    assert '"partition": "old"' in cluster.job(teachers, "options.json").read_text()
    wait_until(lambda: reached(run_dir, 3), 60, lambda: cluster.output(student) + cluster.output(teachers))
    cluster.signal(student, signal.SIGUSR1)
    assert cluster.wait(student) == 75, cluster.output(student)
    assert f"scontrol requeue {student}" in cluster.calls()
    assert not (run_dir / "rendezvous").exists()
    again = cluster.submit(SCRIPTS / "slurm" / "student.sbatch", config, f"run_dir={run_dir}")
    assert cluster.wait(again) == 0, cluster.output(again) + cluster.output(teachers)
    assert cluster.wait(teachers, 60) == 0, cluster.output(teachers)
    assert "the run has finished" in cluster.output(teachers)
    assert losses(run_dir) == reference


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_teachers_job_whose_time_is_up_is_requeued(cluster, config, folder, port):
    run_dir = folder / "leaving"
    student = cluster.submit(SCRIPTS / "slurm" / "student.sbatch", config, f"run_dir={run_dir}", RENDEZVOUS_PORT=port)
    script = SCRIPTS / "slurm" / "teachers.sbatch"
    first = cluster.submit("--array=0-0", script, config, f"run_dir={run_dir}")
    wait_until(lambda: reached(run_dir, 3), 60, lambda: cluster.output(student) + cluster.output(first))
    cluster.signal(first, signal.SIGUSR1)
    assert cluster.wait(first) == 75, cluster.output(first)
    assert f"scontrol requeue {first}" in cluster.calls()
    second = cluster.submit("--array=0-0", script, config, f"run_dir={run_dir}")
    assert cluster.wait(student) == 0, cluster.output(student)
    assert cluster.wait(second, 60) == 0, cluster.output(second)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_heterogeneous_job(cluster, config, folder, reference):
    run_dir = folder / "het"
    job = cluster.submit(SCRIPTS / "slurm" / "het_job.sbatch", config, f"run_dir={run_dir}", tasks="1:2")
    assert cluster.wait(job) == 0, cluster.output(job)
    assert losses(run_dir) == reference
    assert {name for name in ("teacher 0", "teacher 1") if f"{name} joined" in cluster.output(job)}
    steps = [call for call in cluster.calls() if f"run_dir={run_dir}" in call or "--het-group=1" in call]
    assert [step.split()[1] for step in sorted(steps)] == ["--het-group=0", "--het-group=1"]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_torchrun_on_one_node_saves_and_goes_on(cluster, config, folder, reference):
    run_dir = folder / "torchrun"
    command = [str(SCRIPTS / "torchrun_one_node.sh"), str(config), f"run_dir={run_dir}"]
    script = subprocess.Popen(command, env=cluster.environment, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: reached(run_dir, 3), 90, lambda: "no step was done")
    script.send_signal(signal.SIGTERM)
    _, said = script.communicate(timeout=90)
    assert script.returncode == 75, said
    assert status(run_dir)["state"] == "stopped"
    cluster.call(*command)
    assert losses(run_dir) == reference


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_torchrun_on_two_nodes(cluster, config, folder, reference, port):
    run_dir = folder / "two nodes"
    command = [str(SCRIPTS / "torchrun_nodes.sh"), str(config), f"run_dir={run_dir}"]
    variables = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "BIND": "127.0.0.1"}
    nodes = [
        subprocess.Popen(command, env={**cluster.environment, **variables, "NODE_RANK": rank}, stderr=subprocess.PIPE,
                         text=True)
        for rank in "01"
    ]  # fmt: skip
    ended = [node.communicate(timeout=150)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(ended)
    assert losses(run_dir) == reference


@pytest.mark.parametrize(
    "script, arguments, variables, message",
    [
        ("slurm/one_job.sbatch", [], {}, "give the config"),
        ("slurm/one_job.sbatch", ["no such.yaml"], {}, "no such.yaml: is no file"),
        ("slurm/one_job.sbatch", ["CONFIG"], {"PYTHON": "/no/python"}, "PYTHON=/no/python: is no program"),
        ("slurm/student.sbatch", ["CONFIG", "--fast"], {}, "--fast: is no override"),
        ("slurm/submit_two_jobs.sh", ["CONFIG"], {"TEACHER_OPTIONS": "--reject"}, "job was not accepted"),
        ("slurm/submit_two_jobs.sh", ["CONFIG"], {"TEACHER_JOBS": "0"}, "TEACHER_JOBS=0: must be at least 1"),
        ("torchrun_nodes.sh", ["CONFIG"], {}, "set NNODES and NODE_RANK"),
        ("torchrun_nodes.sh", ["CONFIG"], {"NNODES": "2", "NODE_RANK": "2"}, "must be below NNODES=2"),
        ("torchrun_nodes.sh", ["CONFIG"], {"NNODES": "2", "NODE_RANK": "0"}, "set MASTER_ADDR"),
        ("torchrun_nodes.sh", ["CONFIG", "student.ranks=2"],
         {"NNODES": "2", "NODE_RANK": "1", "SLURM_JOB_NODELIST": "n[1-2]"}, "needs 3 ranks, which 2 nodes x 1 do not"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(cluster, config, folder, script, arguments, variables, message):
    words = [str(config) if word == "CONFIG" else word for word in arguments]
    done = cluster.call(
        "bash", SCRIPTS / script, *words, check=False, RUN_DIR=str(folder / "wrong"), SLURM_JOB_ID="7", **variables
    )
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    if "--reject" in variables.values():
        assert any(call.startswith("scancel ") for call in cluster.calls())


def test_the_stand_ins_are_those_that_the_scripts_call():
    text = "".join(path.read_text() for path in SHELL)
    assert {program for program in PROGRAMS if f"{program} " in text} == set(PROGRAMS)
    assert (ROOT / "scripts").is_dir()
