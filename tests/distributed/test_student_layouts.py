"""A student in any layout of ranks has the gradients of one process, its memory, and checkpoints the others can read.

The ranks start once and prove everything in turn; what each proof found is a test of its own.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from disaggkd_cli.config import TrainConfig
from disaggkd_cli.data import empty_micro_batch, load_tokenizer
from disaggkd_cli.errors import RunError
from disaggkd_cli.models import load_causal_lm, resolve_source
from disaggkd_cli.planner.memory import heads, weights
from disaggkd_cli.planner.models.families import model_shape
from disaggkd_cli.planner.terms import total
from disaggkd_cli.training.checkpoint import (
    Checkpointer,
    load_training_state,
    read_checkpoint,
    step_directory,
    training_state,
)
from disaggkd_cli.training.export import export_student
from disaggkd_cli.training.layout import student_mesh
from disaggkd_cli.training.optimizer import build_optimizer
from disaggkd_cli.training.vocabulary_parallel import VocabularyParallel
from tests.support.layouts import TEACHER_WIDTH, Case, compare, train_sharded, whole_gradients
from tests.support.models import VOCABULARY
from tests.support.runs import TINY_TEACHER
from tests.support.spawn import spawn
from tests.unit.planner.planner_toys import toy_model, toy_work

CUT = Case(vocabulary_parallel=True)

LAYOUTS = {
    "replicas": Case(replicate=2),
    "replicas, tied, bfloat16": Case(replicate=2, tied=True, dtype=torch.bfloat16),
    "cut, extra ids of the teacher": replace(CUT, teacher_vocabulary=VOCABULARY + 5),
    "cut, tied, extra ids of the student, a scaled head": replace(
        CUT, tied=True, family="granite", teacher_vocabulary=VOCABULARY - 5
    ),
    "cut, tied, checkpointing": replace(CUT, tied=True, checkpointing="full"),
    "cut, tied, frozen": replace(CUT, tied=True, frozen="embed_tokens"),
    "cut, a head with a bias": replace(CUT, family="phi"),
    "cut, tied to an embedding with a scale": replace(CUT, family="gemma3_text", tied=True),
    "routers held to balance": Case(family="qwen3_moe", router=0.1),
    "routers held to balance, cut, checkpointing": replace(CUT, family="mixtral", router=0.1, checkpointing="full"),
    "hidden states, replicas": Case(replicate=2, hidden="mse"),
    "hidden states, cut, tied, checkpointing": replace(CUT, tied=True, checkpointing="full", hidden="cosine"),
    "hidden states, cut, tied, bfloat16": replace(CUT, tied=True, dtype=torch.bfloat16, hidden="cosine"),
    "cut, tied, a soft cap, bfloat16": replace(CUT, family="gemma2", tied=True, dtype=torch.bfloat16),
}
ON_FOUR_RANKS = {
    "two replicas": Case(replicate=2),
    "four replicas, tied": Case(replicate=4, tied=True),
    "two replicas, tied, full logits": Case(replicate=2, implementation="full", tied=True),
    "two replicas, cut": replace(CUT, replicate=2),
    "two replicas, cut, tied": replace(CUT, replicate=2, tied=True, teacher_vocabulary=VOCABULARY + 5),
    "cut over four, tied": replace(CUT, tied=True, family="cohere"),
    "cut over four, three ids a rank and fewer": replace(CUT, teacher_vocabulary=3),
}
COMPILED = {
    "compiled, routers held to balance": Case(family="qwen3_moe", router=0.1, compiled=True),
    "compiled, replicas": Case(replicate=2, compiled=True),
    "compiled, cut, tied, checkpointing": replace(CUT, tied=True, compiled=True, checkpointing="full"),
}
CROSSINGS = {
    "sharded to cut": (Case(), CUT),
    "sharded to cut, tied": (Case(tied=True), replace(CUT, tied=True)),
    "cut to sharded, tied": (replace(CUT, tied=True), Case(tied=True)),
    "replicas to cut, tied": (Case(replicate=2, tied=True), replace(CUT, tied=True)),
    "cut to replicas": (CUT, Case(replicate=2)),
    "sharded to cut, a projection of hidden states": (Case(hidden="mse"), replace(CUT, hidden="mse")),
}


def memory_is_what_the_planner_says(case: Case, folder: Path) -> None:
    """What a rank keeps between steps, by the storages of the real tensors: masters, gradients, moments, both heads."""
    # Even sizes, so that no rank keeps more than another.
    case = replace(case, vocabulary=128, teacher_vocabulary=128)
    module = case.sharded()
    optimizer = build_optimizer(module, TrainConfig())
    train_sharded(module, range(1), optimizer, keep_gradients=True)
    own = [*module.parameters(), *(parameter.grad for parameter in module.parameters())]
    own += [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    teacher_head = module._teacher_head[0].weight
    work = toy_work(
        student=model_shape(module.model.config.to_dict(), "student", "the test"),
        teacher=toy_model(hidden=TEACHER_WIDTH, vocabulary=128),
        student_ranks=2, student_bytes=4, teacher_bytes=4, vocabulary_parallel=case.vocabulary_parallel,
        hidden_loss=case.hidden or None,
    )  # fmt: skip
    assert _bytes([teacher_head]) == heads.teacher_head(work).value
    assert _bytes(own) == total(weights.states(work, gradients=True))
    held = _bytes([module.model.lm_head.weight, teacher_head])
    both = 4 * 128 * (module.model.config.hidden_size + TEACHER_WIDTH)
    assert held == (both / 2 if case.vocabulary_parallel else both - 4 * 128 * module.model.config.hidden_size / 2)


def no_head_is_ever_whole(folder: Path) -> None:
    """No tensor of a step is as large as a head where the vocabulary is cut; where it is not, one is."""
    large = {"tied": True, "vocabulary": 1024, "teacher_vocabulary": 1024}
    smallest_head = 1024 * TEACHER_WIDTH
    sizes = {}
    for case in (replace(CUT, **large), Case(**large)):
        module = case.sharded()
        with _Largest() as seen:
            whole_gradients(module, 0, gather=False)
        sizes[case.vocabulary_parallel] = seen.elements
    assert sizes[True] < smallest_head <= sizes[False]


def checkpoints_cross(written: Case, read: Case, folder: Path) -> None:
    """What one layout saved goes on in another with the same weights, moments and losses, and is exported whole."""
    first = written.sharded()
    optimizer = build_optimizer(first, TrainConfig(learning_rate=1e-3))
    train_sharded(first, range(2), optimizer)
    group = dist.new_group()
    checkpointer = Checkpointer(folder, 1, group)
    checkpointer.save(first, optimizer, 2, {})
    checkpointer.wait()
    second = read.sharded(seed=5)
    other = build_optimizer(second, TrainConfig(learning_rate=1e-3))
    load_training_state(read_checkpoint(step_directory(folder, 2)), second, other, group)
    states = [{name: _whole(tensor) for name, tensor in training_state(*one).items()} for one in
              ((first, optimizer), (second, other))]  # fmt: skip
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())
    theirs, ours = train_sharded(first, range(2, 4), optimizer), train_sharded(second, range(2, 4), other)
    assert [value for step in ours for value in step] == pytest.approx([value for step in theirs for value in step])
    export_student(second.model, load_tokenizer(TINY_TEACHER), folder / "student", torch.float32)
    # A projection of hidden states is the module's own, and no part of the model.
    whole = {name: _whole(tensor) for name, tensor in second.model.state_dict().items()}
    if dist.get_rank() == 0:
        exported = load_causal_lm(resolve_source(str(folder / "student")), torch.float32, "student").state_dict()
        assert exported.keys() == whole.keys()
        assert all(torch.equal(exported[name], tensor) for name, tensor in whole.items())


def no_rank_has_a_row(folder: Path) -> None:
    """A zero that reaches every parameter, and no NaN."""
    module = replace(CUT, tied=True).sharded()
    loss, out = module(empty_micro_batch(1, 8, 0), torch.empty(0, TEACHER_WIDTH), 0)
    loss.backward()
    assert loss.item() == out.kd.item() == 0
    assert all(float(parameter.grad.full_tensor().abs().max()) == 0 for parameter in module.parameters())


def a_rank_that_stays_away_is_named(folder: Path) -> None:
    """The wait ends at the group's timeout and says what it was for."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    vocabulary = VocabularyParallel(CUT.model(), student_mesh("cpu", group), torch.float32)
    if dist.get_rank() == 0:
        with pytest.raises(RunError, match="waited for the size of each rank's micro-batch.*[Tt]imed out"):
            vocabulary.begin(1, 1, torch.device("cpu"))
    dist.barrier()


def _gradients(cases: dict[str, Case]) -> dict[str, Callable[[Path], None]]:
    return {f"gradients: {name}": partial(lambda case, folder: compare(case), case) for name, case in cases.items()}


PROOFS: dict[str, dict[str, Callable[[Path], None]]] = {
    "gradients": _gradients(LAYOUTS),
    "others": {
        "memory: sharded": partial(memory_is_what_the_planner_says, Case()),
        "memory: sharded, tied": partial(memory_is_what_the_planner_says, Case(tied=True)),
        "memory: sharded, hidden states": partial(memory_is_what_the_planner_says, Case(hidden="mse")),
        "memory: cut": partial(memory_is_what_the_planner_says, CUT),
        "memory: cut, tied": partial(memory_is_what_the_planner_says, replace(CUT, tied=True)),
        "memory: no head is ever whole": no_head_is_ever_whole,
        **{f"checkpoint: {name}": partial(checkpoints_cross, *pair) for name, pair in CROSSINGS.items()},
        "no rank has a row": no_rank_has_a_row,
        "a rank that stays away is named": a_rank_that_stays_away_is_named,
    },
}
"""By name, those of one start of two ranks together."""
SLOW_PROOFS = {2: _gradients(COMPILED), 4: _gradients(ON_FOUR_RANKS)}


def _prove_all(rank: int, ranks: int, proofs: str, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(seconds=90)
    )
    for name, proof in (SLOW_PROOFS[ranks] if proofs == "slow" else PROOFS[proofs]).items():
        try:
            proof(folder / name)
            (folder / f"{name}.{rank}").write_text("proved")
        except BaseException:
            (folder / f"{name}.{rank}").write_text(traceback.format_exc())
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Returns, by group of proofs, a folder with what each rank of two found, proof by proof; each starts once."""

    @functools.cache
    def found_by(group: str) -> Path:
        folder = tmp_path_factory.mktemp("layouts")
        spawn(_prove_all, (2, group, folder), 2)
        return folder

    return found_by


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("group", "name"), [(group, name) for group, proofs in PROOFS.items() for name in proofs])
def test_two_ranks(group, name, found):
    for rank in range(2):
        assert (found(group) / f"{name}.{rank}").read_text() == "proved"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", SLOW_PROOFS)
def test_four_ranks_and_compiled_layers(ranks, tmp_path):
    spawn(_prove_all, (ranks, "slow", tmp_path), ranks)
    texts = {name: [(tmp_path / f"{name}.{rank}").read_text() for rank in range(ranks)] for name in SLOW_PROOFS[ranks]}
    assert texts == {name: ["proved"] * ranks for name in SLOW_PROOFS[ranks]}


class _Largest(TorchDispatchMode):
    """Watches the size of every plain tensor that an operation makes; a DTensor's own size is not that of its shard."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and not isinstance(one, DTensor):
                self.elements = max(self.elements, one.numel())
        return result


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _bytes(tensors: list[Tensor]) -> int:
    """Bytes of all storages behind tensors, so that a view of something larger counts as what it keeps alive."""
    storages = {}
    for tensor in tensors:
        storage = _local(tensor.detach()).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
