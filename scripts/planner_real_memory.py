"""Predicted against measured peak of tensors in real student steps on CPUs, as the Markdown table of docs/planner.md.

    python scripts/planner_real_memory.py [NUMBER ...]

Each case starts two ranks (gloo) that build the trainer's own module, sharded as it shards it, and run three steps
with real
tensors. The peak of the third is what was alive before it (unique storages) and the largest sum of the allocator's
events in it.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch._subclasses.fake_tensor import FakeTensor
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from disaggkd_cli.config import LossConfig
from disaggkd_cli.data import MicroBatch
from disaggkd_cli.losses import Head
from disaggkd_cli.models import hidden_states
from disaggkd_cli.planner import memory
from disaggkd_cli.planner.hardware import load_catalogue
from disaggkd_cli.planner.models.families import model_shape
from disaggkd_cli.planner.workload import Cluster, Efficiency, Workload
from disaggkd_cli.training.layout import StudentLayout, student_mesh
from disaggkd_cli.training.student_module import StudentModule, shard_student, shard_teacher

RANKS, SEQUENCE, ROWS, RING = 2, 256, 8, 3
TOKENS = SEQUENCE * ROWS
STUDENT = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1024,
}
TEACHER = {
    "hidden_size": 384,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1536,
}
COMMON = {"vocab_size": 8192, "head_dim": 32, "tie_word_embeddings": False}
BUDGET = 32 << 20

# mode, implementation (or `shared`: fused, the ranks share the heads), compute bytes of the student, activation
# checkpointing, tied embeddings
CASES = [
    ("disaggregated", "fused", 2, False, False),
    ("disaggregated", "fused", 4, False, False),
    ("disaggregated", "fused", 4, True, False),
    ("disaggregated", "full", 2, False, False),
    ("disaggregated", "full", 4, False, False),
    ("colocated", "fused", 2, False, False),
    ("colocated", "fused", 4, True, False),
    ("colocated", "full", 4, False, False),
    ("disaggregated", "shared", 4, False, False),
    ("disaggregated", "shared", 2, False, False),
    ("disaggregated", "shared", 4, True, True),
    ("disaggregated", "fused", 4, True, True),
]
Case = tuple[str, str, int, bool, bool]


def predicted(case: Case) -> memory.RankMemory:
    """The closed form of a case."""
    mode, implementation, width, checkpointing, tied = case
    gpu = load_catalogue().gpus["H100-SXM"]
    shapes = [
        model_shape({"model_type": "llama", **COMMON, "tie_word_embeddings": tied, **fields}, name, name)
        for name, fields in (("teacher", TEACHER), ("student", STUDENT))
    ]
    work = Workload(
        *shapes, Cluster(gpu, gpu, 8, 50.0, device="cpu"), Efficiency(0.5, 0.5), teacher_bytes=4, student_bytes=width,
        student_ranks=RANKS, micro_batch_tokens=TOKENS, sequence=SEQUENCE, checkpointing=checkpointing, wire_bytes=4.0,
        implementation="full" if implementation == "full" else "fused", asked_budget=BUDGET, ring_depth=RING,
        vocabulary_parallel=implementation == "shared",
    )  # fmt: skip
    fused = implementation != "full"
    return (
        memory.student_rank(work, fused=fused) if mode == "disaggregated" else memory.colocated_rank(work, fused=fused)
    )


def alive() -> int:
    """Bytes of unique storages of all tensors that Python can reach."""
    storages = {}
    for one in gc.get_objects():
        if isinstance(one, torch.Tensor) and not isinstance(one, FakeTensor) and one.device.type == "cpu":
            storage = getattr(one, "_local_tensor", one).untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def rank_main(rank: int, case: Case, folder: str) -> None:
    """One rank: build, warm up, measure; rank 0 writes the peak."""
    mode, implementation, width, checkpointing, tied = case
    shared = implementation == "shared"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    mesh = student_mesh("cpu", dist.group.WORLD)
    torch.manual_seed(0)
    teacher = LlamaForCausalLM(LlamaConfig(**COMMON, **TEACHER)).eval()
    own = StudentLayout(RANKS, 1, rank, shared).teacher_ids(COMMON["vocab_size"], COMMON["vocab_size"])
    head = Head(teacher.lm_head.weight.detach()[slice(*own)].clone())
    backbone = shard_teacher(teacher.base_model, mesh) if mode == "colocated" else None
    # Like the trainer: the teacher's own head goes with the teacher; the student keeps the copy.
    teacher.lm_head = None
    slots = None if backbone is not None else torch.zeros(RING, TOKENS, TEACHER["hidden_size"])
    if backbone is None:
        del teacher
    loss = LossConfig(implementation="full" if implementation == "full" else "fused", memory_budget=str(BUDGET))
    fields = {**COMMON, "tie_word_embeddings": tied, **STUDENT}
    module = StudentModule(LlamaForCausalLM(LlamaConfig(**fields)), head, loss).train()
    dtype, kept = {2: torch.bfloat16, 4: torch.float32}[width], "full" if checkpointing else "none"
    shard_student(module, mesh, dtype, kept, vocabulary_parallel=shared)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    ids = torch.randint(0, COMMON["vocab_size"], (ROWS, SEQUENCE))
    batch = MicroBatch(ids, ((SEQUENCE,),) * ROWS, torch.randint(0, COMMON["vocab_size"], (ROWS, SEQUENCE)))

    def step() -> None:
        if backbone is None:
            hidden = slots[0]
        else:
            with torch.no_grad():
                hidden = hidden_states(backbone, batch.input_ids, batch.position_ids).reshape(TOKENS, -1)[batch.rows]
        module(batch, hidden, TOKENS * RANKS)[0].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    step()
    gc.collect()
    before = alive()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    recorded.export_chrome_trace(f"{folder}/trace{rank}.json")
    events = [
        event
        for event in json.loads(Path(f"{folder}/trace{rank}.json").read_text())["traceEvents"]
        if event.get("name") == "[memory]"
    ]
    running = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        running += event["args"]["Bytes"]
        peak = max(peak, running)
    if rank == 0:
        Path(f"{folder}/peak").write_text(str(before + peak))
    dist.destroy_process_group()


def main(numbers: list[int]) -> int:
    """Print the table."""
    print(
        "| mode | loss | compute | checkpointing | fullest phase | predicted MiB | measured MiB | error "
        "|\n|---|---|---|---|---|---:|---:|---:|"
    )
    words = {"shared": "fused, shared heads"}
    for number in numbers or range(len(CASES)):
        case = CASES[number]
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(rank_main, (case, folder), nprocs=RANKS)
            measured = int(Path(f"{folder}/peak").read_text())
        rank = predicted(case)
        compute = "float32" if case[2] == 4 else "bfloat16"
        loss = words.get(case[1], case[1]) + (", tied" if case[4] else "")
        error = f"{rank.peak_bytes / measured - 1:+.1%}"
        figures = f"{rank.peak_bytes / 2**20:.1f} | {measured / 2**20:.1f} | {error}"
        print(
            f"| {case[0]} | {loss} | {compute} | {'full' if case[3] else 'none'} | {rank.binding.name} | {figures} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main([int(text) for text in sys.argv[1:]]))
