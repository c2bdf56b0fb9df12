"""Each process finds its role and rank from what its launcher says."""

import pytest

from disaggkd_cli.config import Config
from disaggkd_cli.errors import UserError
from disaggkd_cli.launch import Place, child_environment, find_place, keep_to_loopback, threads_for, under_launcher


def config(**sections) -> Config:
    made = Config()
    for name, values in sections.items():
        for key, value in values.items():
            setattr(getattr(made, name), key, value)
    return made


def torchrun(rank, size, **more):
    base = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "localhost"}
    return {name: str(value) for name, value in {**base, "MASTER_PORT": 29500, **more}.items()}


def test_a_bare_start_has_no_launcher():
    assert under_launcher({}) is None
    assert under_launcher({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None


def test_torchrun_gives_the_first_ranks_to_the_student():
    run = config(student={"ranks": 2}, teacher={"replicas": 2})
    found = [find_place(run, "run", torchrun(rank, 4)) for rank in range(4)]
    assert [place.name for place in found] == ["student 0", "student 1", "teacher 0", "teacher 1"]
    assert [place.size for place in found] == [2, 2, 1, 1]
    assert [place.hosts_store for place in found] == [True, False, False, False]


def test_torchruns_own_store_is_used_where_it_serves_one():
    place = find_place(config(), "run", torchrun(0, 2, TORCHELASTIC_USE_AGENT_STORE=True))
    assert not place.hosts_store
    assert place.endpoint == "localhost:29500"


def test_a_colocated_world_is_all_student():
    run = config(student={"ranks": 2})
    run.mode = "colocated"
    assert [find_place(run, "run", torchrun(rank, 2)).role for rank in range(2)] == ["student"] * 2


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_that_do_not_add_up(size):
    run = config(student={"ranks": 2}, teacher={"replicas": 1})
    expected = f"torchrun started {size} ranks, but the config needs 3: student.ranks=2 and 1"
    with pytest.raises(UserError, match=expected):
        find_place(run, "run", torchrun(0, size))


def test_separate_jobs_meet_at_the_rendezvous():
    run = config(launch={"rendezvous": "127.0.0.1:29400"}, student={"ranks": 2})
    student = find_place(run, "student", torchrun(1, 2))
    assert (student.name, student.endpoint, student.hosts_store) == ("student 1", "127.0.0.1:29400", False)
    teacher = find_place(run, "teacher", {})
    assert (teacher.name, teacher.endpoint, teacher.hosts_store) == ("teacher 0", "127.0.0.1:29400", False)


def test_slurm(tmp_path, monkeypatch):
    fake = tmp_path / "scontrol"
    fake.write_text("#!/bin/sh\nprintf 'node7\\nnode8\\n'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    run = config(student={"ranks": 3}, teacher={"replicas": 1})
    variables = {
        "SLURM_PROCID": "3",
        "SLURM_NTASKS": "4",
        "SLURM_LOCALID": "1",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_ID": "123456",
        "SLURM_TASKS_PER_NODE": "2(x2)",
    }
    place = find_place(run, "run", variables)
    assert (place.name, place.local_rank, place.local_size) == ("teacher 0", 1, 2)
    assert place.endpoint == f"node7:{20000 + 123456 % 20000}"


def test_slurm_without_scontrol(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    variables = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "node[7-8]"}
    with pytest.raises(UserError, match="set MASTER_ADDR"):
        find_place(config(), "run", variables)


def test_a_child_finds_the_place_its_supervisor_gave_it():
    place = Place("teacher", 0, 1, 3, 4, 5, "127.0.0.1:1234", False, None, 2, "disaggkd")
    assert find_place(config(), "teacher", child_environment(place, {"PATH": "/bin"})) == place
    host = Place("student", 0, 1, 0, 0, 2, "127.0.0.1:1234", True, 7, 0, "disaggkd")
    assert find_place(config(), "student", child_environment(host, {})) == host


def test_cores_are_shared_out():
    assert threads_for(config(launch={"threads": 5}), Place("student")) == 5
    assert threads_for(config(), Place("student", local_size=10_000)) == 1


def test_loopback_cannot_span_machines(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with pytest.raises(UserError, match="launch.bind: loopback"):
        keep_to_loopback(config(), Place("student", size=8, local_size=4))
    keep_to_loopback(config(launch={"bind": "all"}), Place("student", size=8, local_size=4))


def test_broken_launcher_variables():
    with pytest.raises(UserError, match="RANK is 'x'"):
        find_place(config(), "run", {"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"})
    with pytest.raises(UserError, match="MASTER_ADDR and MASTER_PORT are not"):
        find_place(config(), "run", {"RANK": "0", "WORLD_SIZE": "2"})
