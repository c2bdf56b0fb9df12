"""Checkpoints are whole or refused, and the newest whole one is found."""

import json
import os
import shutil
import threading
import time

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from disaggkd_cli.errors import RunError, UserError
from disaggkd_cli.training.checkpoint import (
    Checkpointer,
    load_training_state,
    newest_checkpoint,
    read_checkpoint,
    step_directory,
    training_state,
)
from disaggkd_cli.training.resume import choose_checkpoint
from disaggkd_cli.training.save_watch import SaveWatch

OTHER_FORMAT = '{"format": 99, "files": {}, "step": 3, "identity": {}}'
IDENTITY = {"data": "d" * 64, "tokenizer": "t" * 64, "seed": 42}


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Tied(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 5)
        self.layer = nn.Linear(5, 5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.layer(self.embed(ids)))


def build(seed: int):
    module = Tied(seed)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh=[0], mesh_dim_names=("shard",))
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
    return module, optimizer


def step(module, optimizer) -> None:
    module(torch.arange(11)).logsumexp(-1).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def snapshot(module, optimizer) -> dict[str, torch.Tensor]:
    return {
        name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()
        for name, tensor in training_state(module, optimizer).items()
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def saved(tmp_path):
    """Three checkpoints, two of them kept, and the newest state."""
    module, optimizer = build(0)
    checkpointer = Checkpointer(tmp_path, 2, dist.new_group(backend="gloo"))
    for number in (1, 2, 3):
        step(module, optimizer)
        checkpointer.save(module, optimizer, number, IDENTITY)
    state = snapshot(module, optimizer)
    checkpointer.wait()
    return tmp_path, state


def test_what_is_saved_is_what_is_loaded(saved):
    root, state = saved
    module, optimizer = build(1)
    assert not same(snapshot(module, optimizer), state)
    load_training_state(read_checkpoint(step_directory(root, 3)), module, optimizer, dist.group.WORLD)
    assert same(snapshot(module, optimizer), state)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path):
    module, optimizer = build(0)
    step(module, optimizer)
    state = snapshot(module, optimizer)
    checkpointer = Checkpointer(tmp_path, 2, dist.new_group(backend="gloo"))
    checkpointer.save(module, optimizer, 1, IDENTITY)
    step(module, optimizer)
    checkpointer.wait()
    again, its_optimizer = build(1)
    load_training_state(read_checkpoint(step_directory(tmp_path, 1)), again, its_optimizer, dist.group.WORLD)
    assert same(snapshot(again, its_optimizer), state)


def test_old_ones_are_pruned_and_nothing_half_done_stays(saved):
    root, _ = saved
    assert sorted(os.listdir(root)) == ["step_00000002", "step_00000003"]


def test_no_pickle_on_disk(saved):
    root, _ = saved
    assert {path.suffix for path in root.rglob("*") if path.is_file()} == {".safetensors", ".json"}


def weights(directory):
    (path,) = directory.glob("*.safetensors")
    return path


def change(directory, **entries):
    path = directory / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: os.truncate(weights(d), weights(d).stat().st_size - 1), "bytes, but the manifest says"),
        (lambda d: os.truncate(weights(d), 0), "has 0 bytes"),
        (lambda d: weights(d).unlink(), "is missing"),
        (lambda d: (d / "manifest.json").unlink(), "was never finished"),
        (lambda d: (d / "manifest.json").write_text("{"), "is damaged"),
        (lambda d: (d / "manifest.json").write_text("[]"), "is damaged"),
        (lambda d: (d / "manifest.json").write_text(OTHER_FORMAT), "format 99"),
        (lambda d: change(d, files=None), "files is no mapping"),
        (lambda d: change(d, files={}), "files is no mapping"),
        (lambda d: change(d, files={weights(d).name: 7}), "is no size and sha256"),
        (lambda d: change(d, files={weights(d).name: {"bytes": "7", "sha256": ""}}), "is no size and sha256"),
        (lambda d: change(d, identity=[]), "identity is no mapping"),
        (lambda d: change(d, step=-5), "step is -5, no number of steps"),
        (lambda d: change(d, step=True), "step is True, no number of steps"),
        (lambda d: change(d, step="3"), "step is '3', no number of steps"),
        (lambda d: change(d, step=2), "step is 2, which does not belong in step_00000003"),
        (lambda d: (d / "manifest.json").write_text("[" * 100_000), "is damaged"),
        (lambda d: (shutil.rmtree(d), d.write_text("a file")), "is damaged"),
    ],
)
def test_damage_is_refused_and_the_one_before_is_used(saved, damage, message):
    root, _ = saved
    damage(step_directory(root, 3))
    said: list[str] = []
    found = newest_checkpoint(root, said.append)
    assert found.step == 2
    assert len(said) == 1
    assert message in said[0]


def test_one_flipped_bit_is_refused(saved):
    root, _ = saved
    path = weights(step_directory(root, 3))
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(UserError, match="contents differ"):
        read_checkpoint(step_directory(root, 3))


def test_a_manifest_cannot_point_outside(saved, tmp_path):
    root, _ = saved
    directory = step_directory(root, 3)
    change(directory, files={"../../etc/passwd": {"bytes": 1, "sha256": ""}})
    with pytest.raises(UserError, match="'../../etc/passwd' is no file of this directory"):
        read_checkpoint(directory)


def test_a_file_that_the_manifest_does_not_name_is_not_read(saved):
    """Laid beside the checkpoint's own file, its tensors would take their places."""
    root, state = saved
    directory = step_directory(root, 3)
    for name in ("a.safetensors", "shard-00002-model-00001-of-00001.safetensors", "z.safetensors"):
        save_file({key: torch.full_like(value, 7.0).contiguous() for key, value in state.items()}, directory / name)
    module, optimizer = build(1)
    load_training_state(read_checkpoint(directory), module, optimizer, dist.group.WORLD)
    assert same(snapshot(module, optimizer), state)


def test_none_is_valid(tmp_path):
    (tmp_path / "step_00000001").mkdir()
    said: list[str] = []
    assert newest_checkpoint(tmp_path, said.append) is None
    assert said


def test_a_checkpoint_that_cannot_be_written_keeps_the_previous_one(saved, monkeypatch):
    root, _ = saved
    monkeypatch.setenv("DISAGGKD_TESTING", "1")
    module, optimizer = build(0)
    step(module, optimizer)
    for number, point in enumerate(("ckpt_open", "ckpt_fsync", "ckpt_rename"), start=4):
        monkeypatch.setenv("DISAGGKD_FAULT", f"student 0.{point}:error")
        monkeypatch.setattr("disaggkd_cli.faults._of_this_process", None)
        checkpointer = Checkpointer(root, 2, dist.new_group(backend="gloo"))
        with pytest.raises(RunError, match=f"checkpoint of step {number} could not be written.*No space left"):
            checkpointer.save(module, optimizer, number, IDENTITY)
            checkpointer.wait()
        assert newest_checkpoint(root, lambda _: None).step == 3


def test_resume_refuses_what_belongs_to_another_run(saved):
    root, _ = saved
    expected = r"this changed: data \(was dddddddddddd, is xxxxxxxxxxxx\); seed \(was 42, is 7\)"
    with pytest.raises(UserError, match=expected):
        choose_checkpoint(root, "auto", {**IDENTITY, "data": "x" * 64, "seed": 7}, lambda _: None)


def test_resume_choices(saved, tmp_path):
    root, _ = saved
    assert choose_checkpoint(root, "never", IDENTITY, print) is None
    assert choose_checkpoint(root, "auto", IDENTITY, print).step == 3
    assert choose_checkpoint(root, str(step_directory(root, 2)), IDENTITY, print).step == 2
    assert choose_checkpoint(tmp_path / "none", "auto", IDENTITY, print) is None
    with pytest.raises(UserError, match="was never finished"):
        choose_checkpoint(root, str(root), IDENTITY, print)


def test_a_checkpoint_of_another_shape(saved):
    root, _ = saved

    class Wider(Tied):
        def __init__(self, seed):
            super().__init__(seed)
            self.more = nn.Linear(5, 3)

    module = Wider(0)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh=[0], mesh_dim_names=("shard",))
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
    with pytest.raises(UserError, match="does not fit this student"):
        load_training_state(read_checkpoint(step_directory(root, 3)), module, optimizer, dist.group.WORLD)


def test_a_save_that_makes_no_progress_has_a_bound(tmp_path, monkeypatch):
    begun, goes_on = threading.Event(), threading.Event()

    def hangs(point):
        if point == "ckpt_fsync":
            begun.set()
            goes_on.wait(30)

    monkeypatch.setattr("disaggkd_cli.training.checkpoint.fault_point", hangs)
    module, optimizer = build(0)
    step(module, optimizer)
    checkpointer = Checkpointer(tmp_path, 2, dist.new_group(backend="gloo"), timeout=0.5)
    checkpointer.save(module, optimizer, 7, IDENTITY)
    assert begun.wait(10)
    with pytest.raises(RunError, match=r"made no progress for 0.5 s \(train.save_timeout\)"):
        checkpointer.wait()
    with pytest.raises(RunError, match="made no progress"):
        checkpointer.save(module, optimizer, 8, IDENTITY)
    goes_on.set()
    checkpointer.wait()
    assert read_checkpoint(step_directory(tmp_path, 7)).step == 7


def test_a_save_that_is_slow_but_goes_on_is_waited_for(tmp_path):
    watch = SaveWatch(tmp_path)
    for number in range(4):
        (tmp_path / "file").write_text("x" * number)
        time.sleep(0.5)
    assert watch.silent_seconds() < 1.6
    watch.close()
