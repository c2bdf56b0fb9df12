"""Which GPUs a job sees, and that two jobs of one machine do not take the same one."""

import subprocess
import sys

import pytest

from disaggkd_cli import cli, gpus
from disaggkd_cli.errors import UserError
from disaggkd_cli.gpus import HeldGpus, gpus_here, hold_gpus, prepare_allocator

KNOWN = {"0": "GPU-aaaa-1", "1": "GPU-bbbb-2"}


@pytest.fixture
def devices(tmp_path, monkeypatch):
    """A machine of two GPUs that nvidia-smi tells of; the locks lie in the test's directory."""
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(gpus, "_identifiers", lambda: KNOWN)
    monkeypatch.setattr(gpus.tempfile, "gettempdir", lambda: str(tmp_path))
    here = gpus_here
    monkeypatch.setattr(gpus, "gpus_here", lambda environment: here(environment, tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, ["GPU-aaaa-1", "GPU-bbbb-2"]), ("1", ["GPU-bbbb-2"]), ("1, 0", ["GPU-bbbb-2", "GPU-aaaa-1"]),
        ("GPU-bbbb", ["GPU-bbbb-2"]), ("MIG-1-2", ["MIG-1-2"]), ("", []), ("-1", []),
    ],
)  # fmt: skip
def test_what_is_visible(devices, visible, seen):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpus_here(environment, devices) == seen


def test_a_machine_without_gpus_has_none(tmp_path):
    assert gpus_here({}, tmp_path) == []


def test_where_nvidia_smi_is_missing_gpus_are_counted_and_not_held(devices, monkeypatch):
    monkeypatch.setattr(gpus, "_identifiers", dict)
    assert gpus_here({}, devices) == ["0", "1"]
    with hold_gpus(2, "a job", {}), hold_gpus(2, "another", {}):
        assert list(devices.glob("*.lock")) == []


def test_the_second_job_on_a_gpu_is_refused_and_told_who_has_it(devices):
    with hold_gpus(1, "`disaggkd run` of runs/a", {}), hold_gpus(1, "b", {"CUDA_VISIBLE_DEVICES": "1"}):
        with pytest.raises(UserError, match=r"GPU-aaaa-1 .* taken by `disaggkd run` of runs/a .*CUDA_VISIBLE_DEVICES"):
            hold_gpus(2, "c", {})
        with hold_gpus(2, "c", {"DISAGGKD_SHARE_GPUS": "1"}):
            pass
    hold_gpus(2, "c", {}).close()


def test_a_refused_job_holds_nothing_of_what_it_could_have(devices):
    with hold_gpus(1, "a", {"CUDA_VISIBLE_DEVICES": "1"}):
        with pytest.raises(UserError):
            hold_gpus(2, "b", {})
        hold_gpus(1, "c", {}).close()


def test_a_killed_job_leaves_its_gpus(devices):
    source = (
        "import sys, time; from disaggkd_cli.gpus import HeldGpus\n"
        f"held = HeldGpus(['GPU-aaaa-1'], 'a', {str(devices)!r}); print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as job:
        try:
            assert job.stdout.readline() == b"held\n"
            with pytest.raises(UserError, match="taken by a"):
                HeldGpus(["GPU-aaaa-1"], "b", str(devices))
        finally:
            job.kill()
            job.wait()
    HeldGpus(["GPU-aaaa-1"], "b", str(devices)).close()


def test_children_do_not_hold_what_their_job_has_let_go_of(devices):
    held = HeldGpus(["GPU-aaaa-1"], "a", str(devices))
    with subprocess.Popen(["sleep", "60"], close_fds=False) as child:
        held.close()
        HeldGpus(["GPU-aaaa-1"], "b", str(devices)).close()
        child.kill()


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_allocator_is_the_users_where_the_user_set_it(name):
    environment = {}
    prepare_allocator(environment)
    assert environment == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    environment = {name: "max_split_size_mb:128"}
    prepare_allocator(environment)
    assert environment == {name: "max_split_size_mb:128"}


def test_the_command_line_sets_the_allocator_before_anything_imports_torch(monkeypatch):
    seen = []
    monkeypatch.setattr(cli, "prepare_allocator", lambda: seen.append("allocator"))
    monkeypatch.setattr(cli, "app", lambda: seen.append("app"))
    cli.main()
    assert seen == ["allocator", "app"]
