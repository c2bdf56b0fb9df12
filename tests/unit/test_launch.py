"""Each process finds its role and rank from what its launcher says."""

import os
import socket

import pytest

from disaggkd_cli.addresses import resolve_bind
from disaggkd_cli.config import Config
from disaggkd_cli.errors import UserError
from disaggkd_cli.launch import (
    Place,
    child_environment,
    discover_rendezvous,
    find_place,
    settle_interfaces,
    threads_for,
    under_launcher,
)


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


def slurm(rank, size, nodes="node[07-08]", tasks="2(x2)", **more):
    per_node = size if tasks.isdigit() else 2
    base = {
        "SLURM_PROCID": rank,
        "SLURM_NTASKS": size,
        "SLURM_LOCALID": rank % per_node,
        "SLURM_NODEID": rank // per_node,
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_JOB_ID": 123456,
        "SLURM_TASKS_PER_NODE": tasks,
    }
    return {name: str(value) for name, value in {**base, **more}.items()}


PORT = 15000 + 123456 % 15000


def test_slurm_needs_no_scontrol(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    run = config(student={"ranks": 3}, teacher={"replicas": 1}, launch={"bind": "all"})
    place = find_place(run, "run", slurm(3, 4))
    assert (place.name, place.local_rank, place.local_size) == ("teacher 0", 1, 2)
    assert place.endpoint == f"node07:{PORT}"
    assert [find_place(run, "run", slurm(rank, 4)).hosts_store for rank in range(4)] == [True, False, False, False]


def test_slurm_nodes_of_different_sizes():
    run = config(student={"ranks": 5}, teacher={"replicas": 2}, launch={"bind": "all"})
    variables = slurm(6, 7, "a1,b[2-3]", "3(x2),1", SLURM_NODEID=2, SLURM_LOCALID=0)
    place = find_place(run, "run", variables)
    assert (place.name, place.local_size, place.endpoint) == ("teacher 1", 1, f"a1:{PORT}")


def test_a_slurm_step_counts_before_its_job():
    run = config(student={"ranks": 1}, teacher={"replicas": 1}, launch={"bind": "all"})
    step = {"SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "node08"}
    place = find_place(run, "run", slurm(1, 16, tasks="8(x2)", **step))
    assert (place.name, place.endpoint) == ("teacher 0", f"node08:{PORT}")


def test_a_slurm_job_on_one_node_stays_on_loopback():
    run = config(student={"ranks": 1}, teacher={"replicas": 1})
    assert find_place(run, "run", slurm(0, 2, "node7", "2")).endpoint == f"127.0.0.1:{PORT}"


@pytest.mark.parametrize(
    "variables, message",
    [
        (slurm(0, 4, tasks="2,1"), r"4 tasks, but those of its nodes are \[2, 1\]"),
        (slurm(9, 4), "SLURM_PROCID=9 lies outside this step's 4 tasks"),
        (slurm(0, 4, tasks="2(y2)"), "SLURM_TASKS_PER_NODE cannot be read"),
        (slurm(0, 4, nodes="node[1-"), "set MASTER_ADDR"),
    ],
)
def test_slurm_variables_that_do_not_add_up(monkeypatch, variables, message):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(UserError, match=message):
        find_place(config(student={"ranks": 3}), "run", variables)


def test_node_lists_of_another_form_are_left_to_scontrol(tmp_path, monkeypatch):
    fake = tmp_path / "scontrol"
    fake.write_text("#!/bin/sh\nprintf 'odd7\\nodd8\\n'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    run = config(student={"ranks": 3}, launch={"bind": "all"})
    assert find_place(run, "run", slurm(0, 4, nodes="odd[7..8]")).endpoint == f"odd7:{PORT}"


HETEROGENEOUS = {
    "SLURM_HET_SIZE": 2,
    "SLURM_JOB_NODELIST_HET_GROUP_0": "gpu-a[1-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "gpu-b3",
    "SLURM_TASKS_PER_NODE_HET_GROUP_0": "2(x2)",
    "SLURM_TASKS_PER_NODE_HET_GROUP_1": "3",
}


def test_one_step_over_the_components_of_a_heterogeneous_job():
    run = config(student={"ranks": 4}, teacher={"replicas": 3}, launch={"bind": "all"})
    variables = slurm(5, 3, "gpu-b3", "3", SLURM_NODEID=2, SLURM_LOCALID=1, **HETEROGENEOUS)
    place = find_place(run, "run", variables)
    assert (place.name, place.local_size, place.endpoint) == ("teacher 1", 3, f"gpu-a1:{PORT}")


def test_both_roles_of_a_heterogeneous_job_find_the_student():
    run = config(student={"ranks": 4}, teacher={"replicas": 3}, launch={"bind": "all"})
    student = slurm(0, 4, "gpu-a[1-2]", "2(x2)", **HETEROGENEOUS)
    teacher = slurm(2, 3, "gpu-b3", "3", **HETEROGENEOUS)
    roles = {"student": student, "teacher": teacher}
    found = {discover_rendezvous(run, role, variables) for role, variables in roles.items()}
    assert found == {f"gpu-a1:{PORT}"}
    run.launch.rendezvous = found.pop()
    place = find_place(run, "teacher", teacher)
    assert (place.name, place.endpoint, place.hosts_store) == ("teacher 2", f"gpu-a1:{PORT}", False)


def test_discovery():
    run = config(launch={"bind": "all"})
    assert discover_rendezvous(run, "student", slurm(0, 1, "n[4-5]", "1")) == f"n4:{PORT}"
    assert discover_rendezvous(run, "teacher", slurm(0, 1, "n4", "1")) is None, "another job's teacher cannot know"
    assert discover_rendezvous(run, "student", {}) is None
    assert discover_rendezvous(config(), "student", slurm(0, 1, "n4", "1")) == f"127.0.0.1:{PORT}"
    given = config(launch={"rendezvous": "there:1"})
    assert discover_rendezvous(given, "student", slurm(0, 1, "n4", "1")) == "there:1"
    with pytest.raises(UserError, match="launch.bind: loopback"):
        discover_rendezvous(config(), "student", slurm(0, 4))


def test_single_teachers_of_an_array_of_jobs_have_names_of_their_own():
    run = config(launch={"rendezvous": "there:1", "bind": "all"})
    assert find_place(run, "teacher", slurm(0, 1, "n4", "1", SLURM_ARRAY_TASK_ID=5)).name == "teacher 5"
    assert find_place(run, "student", slurm(0, 1, "n4", "1", SLURM_ARRAY_TASK_ID=5)).name == "student 0"


def test_jobs_of_their_own_meet_without_the_prefix_of_a_world(no_interfaces):
    from disaggkd_cli.runtime import meet

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    run = config(launch={"rendezvous": endpoint})
    student = meet(run, Place("student", endpoint=endpoint, hosts_store=True, launcher="disaggkd"), timeout=10)
    teacher = meet(run, Place("teacher", endpoint=endpoint, launcher="slurm"), timeout=10)
    student.set("hello", "there")
    assert teacher.get("hello") == b"there"


def test_a_rank_opens_as_many_files_as_it_may():
    import resource

    from disaggkd_cli.runtime import raise_file_limit

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        raise_file_limit()
        most = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_several_replicas_in_one_teacher_step_and_in_an_array_of_them():
    run = config(teacher={"ranks_per_replica": 2}, launch={"rendezvous": "there:1", "bind": "all"})
    found = [find_place(run, "teacher", slurm(rank, 4, SLURM_ARRAY_TASK_ID=3)) for rank in range(4)]
    assert [(place.replica, place.rank, place.size) for place in found] == [(6, 0, 2), (6, 1, 2), (7, 0, 2), (7, 1, 2)]
    with pytest.raises(UserError, match="3 ranks of the teacher, no multiple of teacher.ranks_per_replica=2"):
        find_place(run, "teacher", torchrun(0, 3))


def test_a_child_finds_the_place_its_supervisor_gave_it():
    place = Place("teacher", 0, 1, 3, 4, 5, "127.0.0.1:1234", False, None, 2, "disaggkd")
    assert find_place(config(), "teacher", child_environment(place, {"PATH": "/bin"})) == place
    host = Place("student", 0, 1, 0, 0, 2, "127.0.0.1:1234", True, 7, 0, "disaggkd")
    assert find_place(config(), "student", child_environment(host, {})) == host


def test_cores_are_shared_out():
    assert threads_for(config(launch={"threads": 5}), Place("student")) == 5
    assert threads_for(config(), Place("student", local_size=10_000)) == 1


@pytest.mark.parametrize(("cores", "student", "teacher"), [(2, 2, 1), (16, 16, 8), (1, 1, 1)])
def test_students_share_all_cores_of_a_machine_and_teachers_beside_them_half_as_many(
    monkeypatch, cores, student, teacher
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    beside = config()
    assert threads_for(beside, Place("student", local_size=2)) == student
    assert threads_for(beside, Place("teacher", local_size=2)) == teacher
    assert threads_for(beside, Place("teacher", local_size=1)) == cores  # alone on its machine
    beside.mode = "colocated"
    assert threads_for(beside, Place("student", local_size=1)) == cores


@pytest.fixture
def no_interfaces(monkeypatch):
    for variable in INTERFACE_VARIABLES:
        monkeypatch.setenv(variable, "")  # restored at the end
        monkeypatch.delenv(variable)


INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def interfaces():
    return [os.environ.get(variable) for variable in INTERFACE_VARIABLES]


def test_loopback_cannot_span_machines(no_interfaces):
    with pytest.raises(UserError, match="launch.bind: loopback"):
        settle_interfaces(config(), Place("student", size=8, local_size=4))
    with pytest.raises(UserError, match="launch.bind=loopback, but launch.rendezvous=192.0.2.1:5"):
        settle_interfaces(config(), Place("student", endpoint="192.0.2.1:5"))
    settle_interfaces(config(launch={"bind": "all"}), Place("student", size=8, local_size=4))
    assert interfaces() == [None, None]


@pytest.mark.parametrize("bind", ["loopback", "lo", "127.0.0.1"])
def test_both_libraries_use_the_interface_that_bind_means(no_interfaces, bind):
    settle_interfaces(config(launch={"bind": bind}), Place("student"))
    assert interfaces() == ["lo", "lo"]
    assert resolve_bind(bind, "127.0.0.1:29500") in ("loopback", "127.0.0.1")


def test_the_users_own_choice_of_interface_stays(no_interfaces, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    settle_interfaces(config(), Place("student"))
    assert interfaces() == ["ib7", "lo"]


def test_an_interface_that_is_not_here(no_interfaces):
    with pytest.raises(UserError, match="launch.bind=ib9: is neither an interface of this machine nor an address"):
        settle_interfaces(config(launch={"bind": "ib9"}), Place("student"))


def test_broken_launcher_variables():
    with pytest.raises(UserError, match="RANK is 'x'"):
        find_place(config(), "run", {"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"})
    with pytest.raises(UserError, match="MASTER_ADDR and MASTER_PORT are not"):
        find_place(config(), "run", {"RANK": "0", "WORLD_SIZE": "2"})
