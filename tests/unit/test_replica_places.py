"""Where the ranks of teacher replicas stand, whoever starts them."""

import pytest

from disaggkd_cli.config import Config
from disaggkd_cli.errors import UserError
from disaggkd_cli.jobs import run_job
from disaggkd_cli.launch import child_environment, find_place
from disaggkd_cli.supervise import places
from tests.support.runs import write_config


@pytest.fixture
def config():
    made = Config()
    made.teacher.replicas, made.teacher.ranks_per_replica = 2, 2
    made.launch.rendezvous = "127.0.0.1:29400"
    return made


def torchrun(rank, size, **more):
    base = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}
    return {name: str(value) for name, value in {**base, "MASTER_PORT": 29500, **more}.items()}


def test_a_bare_run_numbers_ranks_by_replica(config):
    found = places(config, ("student", "teacher"), "127.0.0.1:1", 7)
    assert [place.name for place in found] == ["student 0", "teacher 0.0", "teacher 0.1", "teacher 1.0", "teacher 1.1"]
    assert [place.local_rank for place in found] == [0, 1, 2, 3, 4]
    assert {place.world_endpoint for place in found} == {None}


def test_a_bare_teacher_is_one_replica_with_a_meeting_place_of_its_own(config):
    found = places(config, ("teacher",), "127.0.0.1:1", 7)
    assert [place.name for place in found] == ["teacher 0.0", "teacher 0.1"]
    assert [(place.hosts_world, place.listen_fd) for place in found] == [(True, 7), (False, None)]
    assert {(place.endpoint, place.world_endpoint) for place in found} == {("127.0.0.1:29400", "127.0.0.1:1")}
    for place in found:
        assert find_place(config, "teacher", child_environment(place, {})) == place


def test_torchrun_starts_as_many_replicas_as_its_ranks_make(config):
    found = [find_place(config, "teacher", torchrun(rank, 4)) for rank in range(4)]
    assert [place.name for place in found] == ["teacher 0.0", "teacher 0.1", "teacher 1.0", "teacher 1.1"]
    assert {(place.endpoint, place.world_endpoint) for place in found} == {("127.0.0.1:29400", "127.0.0.1:29500")}
    assert [place.hosts_world for place in found] == [True, False, False, False]
    with_agent = find_place(config, "teacher", torchrun(0, 4, TORCHELASTIC_USE_AGENT_STORE="True"))
    assert not with_agent.hosts_world
    with pytest.raises(UserError, match="torchrun started 3 ranks of the teacher"):
        find_place(config, "teacher", torchrun(0, 3))


def test_a_slurm_step_of_teachers_keeps_off_the_students_port(config):
    variables = {
        "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "3", "SLURM_JOB_NODELIST": "node7",
        "SLURM_JOB_ID": "30007", "SLURM_TASKS_PER_NODE": "4",
    }  # fmt: skip
    place = find_place(config, "teacher", variables)
    assert (place.name, place.world_endpoint, place.hosts_world) == ("teacher 1.1", "127.0.0.1:15008", False)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (1, ""),
        (2, "teacher.parallelism=auto: pipeline, since a pipeline gives one rank's bits and gathers nothing\n"),
        (5, "teacher.parallelism=auto: fsdp, since no pipeline: 5 stages, but"),
    ],
)
def test_a_start_says_what_auto_comes_to(tmp_path, capsys, ranks, said):
    path = str(write_config(tmp_path / "run.yaml"))
    assert run_job("run", path, [f"teacher.ranks_per_replica={ranks}"], "never", 0, False, True) == 0
    told = capsys.readouterr().err
    assert said in told if said else "parallelism" not in told
