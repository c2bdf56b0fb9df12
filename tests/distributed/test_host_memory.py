"""What a rank holds of a model in its machine's memory while it starts, loads and exports."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from disaggkd_cli.config import Config
from disaggkd_cli.config.models import FromTeacherConfig
from disaggkd_cli.data import load_tokenizer
from disaggkd_cli.losses import Head
from disaggkd_cli.models.fill import fill
from disaggkd_cli.models.hollow import hollow_backbone
from disaggkd_cli.models.load import resolve_source
from disaggkd_cli.models.parts import PART_BYTES
from disaggkd_cli.models.student import build_student
from disaggkd_cli.training.build import Components, build_module, read_student
from disaggkd_cli.training.export import export_student
from disaggkd_cli.training.layout import StudentLayout, shard_mesh
from disaggkd_cli.training.student_module import shard_teacher
from tests.support.runs import TINY_TEACHER
from tests.support.spawn import spawn

MIB = 2**20
CPU = torch.device("cpu")


def say_nothing(line: str) -> None:
    pass


def save_model(directory: Path, width: int, layers: int, **changes) -> Path:
    config = LlamaConfig(
        vocab_size=512, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True, **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory, max_shard_size="64MB")
    return directory


def config_of(model: Path, ranks: int) -> Config:
    config = Config()
    config.teacher.model = str(model)
    config.student.ranks = ranks
    config.student.from_teacher = FromTeacherConfig("every_1")
    return config


def sharded_student(config: Config, rank: int):
    model, parts = read_student(config, False, say_nothing)
    assert parts is not None
    head = Head(torch.zeros(512, 8))
    layout = StudentLayout(config.student.ranks, config.student.replicate, rank)
    components = Components(model, head, None, None, None, {}, layout, parts=parts)
    module, _ = build_module(config, components, CPU, say_nothing)
    return module, components.mesh


def join(rank: int, folder: str, ranks: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)


def read_shard_and_export(rank: int, folder: str, ranks: int, file_bytes: int) -> None:
    join(rank, folder, ranks)
    module, _ = sharded_student(config_of(Path(folder, "model"), ranks), rank)
    tokenizer = load_tokenizer(str(TINY_TEACHER))
    export_student(module.model, tokenizer, Path(folder, "student"), torch.float32, "card", file_bytes)
    dist.destroy_process_group()


@pytest.mark.parametrize(("ranks", "file_bytes", "files"), [(2, 2**30, 1), (3, 300_000, 4)])
def test_a_student_read_by_shards_and_written_by_ranks_is_the_same(tmp_path, ranks, file_bytes, files):
    model = save_model(tmp_path / "model", 64, 3)
    spawn(read_shard_and_export, (str(tmp_path), ranks, file_bytes), ranks)
    written = sorted((tmp_path / "student").glob("*.safetensors"))
    assert len(written) == files and (tmp_path / "student" / "README.md").read_text() == "card"
    found = {name: tensor for path in written for name, tensor in load_file(path).items()}
    expected = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    expected.pop("lm_head.weight")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "student", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


class Watch:
    """The most memory of its own (no mapped files) that this process had meanwhile, beyond what it had before."""

    def __enter__(self) -> Watch:
        self._before, self.most, self._done = own_bytes(), 0, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._done.wait(0.001):
            self.most = max(self.most, own_bytes() - self._before)

    def __exit__(self, *_) -> None:
        self._done.set()
        self._thread.join()


def own_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) * 1024


def under_a_limit(rank: int, folder: str, ranks: int, room: int) -> None:
    join(rank, folder, ranks)
    config = config_of(Path(folder, "model"), ranks)
    config.student.dtype = "bfloat16"
    with Watch() as started:
        module, mesh = sharded_student(config, rank)
    with Watch() as exported:
        tokenizer = load_tokenizer(str(TINY_TEACHER))
        export_student(module.model, tokenizer, Path(folder, "student"), torch.bfloat16, file_bytes=64 * MIB)
    del module
    gc.collect()
    source = resolve_source(config.teacher.model)
    with Watch() as taught:
        backbone = hollow_backbone(source, torch.float32, "teacher.model", "auto")
        fill(shard_teacher(backbone.model, shard_mesh(mesh)), backbone.parts, CPU)
    assert max(started.most, taught.most) <= room, (started.most, taught.most, room)
    assert exported.most <= 128 * MIB + 48 * MIB, exported.most  # a file, one more that is read back
    if rank == 0:
        del backbone
        with Watch() as whole:
            build_student(config)
        assert whole.most > 1.5 * room  # so it does tell the difference
    dist.destroy_process_group()


@pytest.mark.slow
def test_four_ranks_start_and_export_with_their_shards_and_one_layer(tmp_path):
    save_model(tmp_path / "model", 768, 24)
    whole = 24 * (4 + 12) * 768 * 768 * 4
    spawn(under_a_limit, (str(tmp_path), 4, whole // 4 + PART_BYTES + 48 * MIB), 4)
