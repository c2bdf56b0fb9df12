"""Build what a student rank trains with, from the config: models, texts, the sharded module, the source."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from disaggkd_cli.config import Config
from disaggkd_cli.config.by_device import AUTO, loss_budget, student_dtype
from disaggkd_cli.config.on_policy import student_writes
from disaggkd_cli.data import Splits, compare_vocabularies, load_tokenizer, padding_id, tokenizer_fingerprint
from disaggkd_cli.errors import SavedAndResumable
from disaggkd_cli.losses import Head
from disaggkd_cli.losses.placement import HeadTraffic
from disaggkd_cli.models import (
    backbone_of,
    build_student,
    decide_packing,
    head_of,
    load_config,
    load_head_shard,
    model_fingerprint,
    require_attention,
    router_loss_of,
    set_attention,
    set_attention_of_checks,
    teacher_source,
    verify_ids,
    verify_packing,
    verify_split,
)
from disaggkd_cli.models.fill import fill
from disaggkd_cli.models.hollow import ReadWhole, hollow_backbone, hollow_student, proved_on_small
from disaggkd_cli.models.load import DTYPES
from disaggkd_cli.models.parts import Part, verified
from disaggkd_cli.models.verified import load_verified_teacher
from disaggkd_cli.on_policy.gathered import GatheredStudent
from disaggkd_cli.training.layer_choice import settle_layers
from disaggkd_cli.training.layout import StudentLayout, group_timeout, layout_of, shard_mesh, student_mesh
from disaggkd_cli.training.on_policy import on_policy_dataset
from disaggkd_cli.training.optimizer import build_optimizer
from disaggkd_cli.training.process import memory_for_this_process
from disaggkd_cli.training.recorded import RecordedSource, open_recording
from disaggkd_cli.training.schedule import WorkItem
from disaggkd_cli.training.settings import SETTINGS, settings_of
from disaggkd_cli.training.sources import ColocatedSource, HiddenStateSource, RemoteSource
from disaggkd_cli.training.student_module import StudentModule, freeze, shard_student, shard_teacher
from disaggkd_cli.training.texts import read_texts
from disaggkd_cli.transport import HiddenStateRing, Identity, Secret, TeacherPool, TeachersLost
from disaggkd_cli.units import format_bytes

Log = Callable[[str], None]


@dataclass
class Components:
    """What a rank has built before anything is sharded.

    Attributes:
        model: the student, float32: on the CPU, or without weights (`meta`) where it is sharded over ranks.
        teacher_head: the teacher's frozen head, in the teacher's dtype; only this rank's rows when vocabulary-parallel.
        teacher_backbone: the frozen teacher itself, in colocated runs only.
        tokenizer: the student's.
        splits: tokenized training and held-out sequences.
        identity: what the run is made of; recorded in checkpoints and compared on resume. Its settings may differ.
        shared_ids: ids from here on are known to one tokenizer only, or to none.
        layout: this rank's place among the student's.
        teacher_vocabulary: ids of the teacher's whole head.
        mesh: of all student ranks, once `build_module` has made it.
        parts: the weights of a student without them; each rank reads its own shards.
        teacher_parts: those of such a teacher.
        writer_copy: takes the student's weights to write with, in on-policy runs, once `build_module` has made it.
    """

    model: nn.Module
    teacher_head: Head
    teacher_backbone: nn.Module | None
    tokenizer: Any
    splits: Splits
    identity: dict[str, Any]
    shared_ids: int = 0
    layout: StudentLayout = field(default_factory=StudentLayout)
    teacher_vocabulary: int = 0
    mesh: DeviceMesh | None = None
    parts: Iterator[Part] | None = None
    teacher_parts: Iterator[Part] | None = None
    writer_copy: GatheredStudent | None = None

    @property
    def pad_id(self) -> int:
        """The token id that fills short rows up; padding is never supervised, so any id does."""
        return padding_id(self.tokenizer)


def build_components(config: Config, log: Log, directory: Path, device: torch.device) -> Components:
    """Load and check models, tokenizers and texts. Collective over all student ranks.

    Args:
        config: the run; `best_N` layers are settled in it.
        log: takes lines for a person.
        directory: the run's.
        device: that this rank computes on.

    Raises:
        UserError: naming what cannot be read, split or packed, or which token ids differ.
    """
    require_attention(config.student.attention, "student.attention")
    source = teacher_source(config)
    teacher_tokenizer = load_tokenizer(config.teacher.model)
    tokenizer = load_tokenizer(config.student.model) if config.student.model else teacher_tokenizer
    shared = compare_vocabularies(teacher_tokenizer, tokenizer)
    pack, reason = decide_packing(config)
    log(f"documents are {'packed into rows' if pack else 'kept one per row'}: {reason}")
    splits = read_texts(config, tokenizer, pack, log)
    settle_layers(config, splits.train, directory, log)
    model, parts = read_student(config, pack, log)
    layout = _layout(config, model, load_config(source, "teacher.model"), device, log)
    vocabulary = len(head_of(model).weight)
    teacher_backbone, teacher_head, teacher_vocabulary, teacher_parts = _teacher(
        config, source, layout, vocabulary, log
    )
    sizes = (teacher_vocabulary, vocabulary)
    for dataset in (splits.train, splits.evaluation):
        dataset.verify(lambda ids, labels: verify_ids(ids, labels, shared, sizes))
    identity = {
        "data": splits.train.fingerprint,
        "held-out data": splits.evaluation.fingerprint,
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "teacher tokenizer": tokenizer_fingerprint(teacher_tokenizer),
        "teacher": model_fingerprint(source),
        "seed": config.seed,
        "global batch (sequences)": config.global_batch_sequences,
        "on_policy": asdict(config.on_policy) if student_writes(config) else None,
        SETTINGS: settings_of(config),
    }
    if student_writes(config):
        splits = replace(splits, train=on_policy_dataset(config, splits.train, log))
    return Components(
        model, teacher_head, teacher_backbone, tokenizer, splits, identity, min(shared, *sizes), layout,
        teacher_vocabulary,
        parts=parts, teacher_parts=teacher_parts,
    )  # fmt: skip


def read_student(config: Config, pack: bool, log: Log) -> tuple[nn.Module, Iterator[Part] | None]:
    """Return the student, frozen where it is to be and proved; where ranks share its weights, without them and with
    them part by part.

    Its class is then proved on a small model, and the weights when they are read.
    """
    student, name = config.student, "the student"
    if student.ranks > student.replicate:
        try:
            hollow = hollow_student(config)
            freeze(hollow.model, student.freeze)  # what travels depends on whether the head is trained
            proved_on_small(hollow.model, student.attention, "student.attention", name, packs=pack)
            return hollow.model, verified(hollow.parts, hollow.model, name)
        except ReadWhole as reason:
            log(f"each rank holds the whole student in float32 until it is sharded: {reason}")
    model = build_student(config)
    freeze(model, student.freeze)
    set_attention_of_checks(model, student.attention, "student.attention", torch.device("cpu"))
    head = head_of(model)
    verify_split(model, head, name, fresh=student.from_config is not None)
    if pack:
        verify_packing(backbone_of(model), head.weight.shape[0], name)
    return model, None


def _layout(config: Config, model: nn.Module, teacher_config: Any, device: torch.device, log: Log) -> StudentLayout:
    """Return this rank's place, deciding `loss.vocabulary_parallel: auto` by the bytes that either way sends."""
    rank, wanted = dist.get_rank(), config.loss.vocabulary_parallel
    if wanted == "auto":
        head, shards = head_of(model), config.student.ranks // config.student.replicate
        tokens = config.train.micro_batch_sequences * config.data.sequence_length
        traffic = HeadTraffic(
            ranks=shards,
            rows=tokens,
            tokens=tokens,
            vocabulary=head.weight.shape[0],
            student_width=head.weight.shape[1],
            teacher_width=teacher_config.get_text_config().hidden_size,
            student_bytes=DTYPES[student_dtype(config, device.type)].itemsize,
            teacher_bytes=DTYPES[config.teacher.dtype].itemsize,
            tied=model.get_input_embeddings().weight is head.weight,
            head_trained=head.weight.requires_grad,
        )
        wanted = config.loss.implementation == "fused" and traffic.rows_should_travel
        log(
            f"loss.vocabulary_parallel=auto: {'rows' if wanted else 'heads'} are gathered ({traffic.rows_bytes:.3g} "
            f"bytes a micro-batch for rows, {traffic.heads_bytes:.3g} for heads)"
        )
    layout = layout_of(config, rank, vocabulary_parallel=bool(wanted))
    if layout.ranks > 1:
        log(f"student layout: {layout.describe()}")
    return layout


def _teacher(
    config: Config, source: Any, layout: StudentLayout, student_vocabulary: int, log: Log
) -> tuple[nn.Module | None, Head, int, Iterator[Part] | None]:
    """Return the backbone (colocated only), the rows of the head that this rank keeps, the whole vocabulary, and the
    weights of a backbone that has none yet."""

    def ids(vocabulary: int) -> tuple[int, int]:
        return layout.teacher_ids(student_vocabulary, vocabulary)

    dtype, key = DTYPES[config.teacher.dtype], "teacher.model"
    if config.mode == "disaggregated":
        return None, *load_head_shard(source, dtype, key, ids), None
    if layout.shard_ranks > 1:
        try:
            hollow = hollow_backbone(source, dtype, key, config.teacher.attention, packs=decide_packing(config)[0])
            return hollow.model, *load_head_shard(source, dtype, key, ids), hollow.parts
        except ReadWhole as reason:
            log(f"each rank holds the whole teacher until it is sharded: {reason}")
    teacher = load_verified_teacher(config, torch.device("cpu"), keep_head=ids)
    return teacher.backbone, teacher.head, teacher.vocabulary_size, None


def build_module(
    config: Config, components: Components, device: torch.device, log: Log
) -> tuple[StudentModule, torch.optim.Optimizer]:
    """Freeze, shard and move the student, and build its optimizer. Collective over all student ranks."""
    frozen = freeze(components.model, config.student.freeze)
    trained = sum(parameter.numel() for parameter in components.model.parameters() if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in components.model.parameters())
    log(f"student: {total:,} parameters, {trained:,} of them trained" + (f"; {len(frozen)} frozen" if frozen else ""))
    head = components.teacher_head
    bias = None if head.bias is None else head.bias.to(device)
    set_attention(components.model, config.student.attention, "student.attention")
    if student_writes(config):
        components.writer_copy = GatheredStudent(components.model, DTYPES[student_dtype(config, device.type)])
    router = router_loss_of(components.model, config.student.router_aux_weight)
    if router is not None:
        log(f"student.router_aux_weight={router.weight:g}: the load-balancing loss of {router.experts} experts a layer")
    teacher_head = Head(head.weight.to(device), bias, head.scale, head.softcap)
    micro_batches = config.student.ranks * config.train.accumulation
    budget = loss_budget(
        config, device.type, memory_for_this_process(device), total, trained, components.layout.shard_ranks
    )
    if config.loss.memory_budget == AUTO:
        log(f"loss.memory_budget=auto is {format_bytes(budget)}")
    loss = replace(config.loss, memory_budget=str(budget))
    module = StudentModule(components.model, teacher_head, loss, router, micro_batches, config.seed)
    if module.projection is not None:
        widths = " x ".join(map(str, reversed(module.projection.shape)))
        log(f"loss.hidden_weight={loss.hidden_weight:g}: a projection of {widths} is trained beside the student")
    module.train()
    components.mesh = student_mesh(device.type, dist.group.WORLD, components.layout.replicate, group_timeout(config))
    shard_student(
        module,
        components.mesh,
        DTYPES[student_dtype(config, device.type)],
        config.student.activation_checkpointing,
        vocabulary_parallel=components.layout.vocabulary_parallel,
        compiled=config.student.compile,
    )
    if components.parts is not None:
        fill(module.model, components.parts, device)
    return module, build_optimizer(module, config.train)


def agreed_run_id() -> str:
    """Return an id, drawn by student rank 0 for as long as these ranks live. Collective over all student ranks.

    It is stamped on every header of their links, so that nothing sent to another run, or to the ranks that a restart
    replaced, is taken for an answer.
    """
    drawn = torch.tensor(list(secrets.token_bytes(8)), dtype=torch.uint8)
    dist.broadcast(drawn, src=0)
    return bytes(drawn.tolist()).hex()


def open_source(
    config: Config,
    components: Components,
    rank: int,
    store: dist.Store,
    device: torch.device,
    items: Iterator[WorkItem],
    log: Log,
    *,
    secret: Secret,
    wait: bool = True,
    asked: Callable[[int], None] = lambda request: None,
) -> tuple[HiddenStateSource, TeacherPool | None]:
    """Return where hidden states come from, and the pool of teachers where they are elsewhere.

    With `wait` a teacher is there when this returns; without, none need come, as when nothing is left to be trained.
    `asked` is told the id of each request as it is sent.

    Raises:
        UserError: only teachers came that do not belong to this student.
        SavedAndResumable: none came within `transport.teacher_wait`.
    """
    if config.mode == "colocated":
        backbone = shard_teacher(components.teacher_backbone, shard_mesh(components.mesh))
        if components.teacher_parts is not None:
            fill(backbone, components.teacher_parts, device)
        return ColocatedSource(backbone, items, device), None
    width = components.teacher_head.weight.shape[1]
    if config.teacher.cache:
        return RecordedSource(open_recording(config, width), items, device), None
    transport = config.transport
    identity = Identity(
        role=f"student {rank}",
        teacher_fingerprint=components.identity["teacher"],
        tokenizer_fingerprint=components.identity["teacher tokenizer"],
        vocabulary_size=components.teacher_vocabulary,
        hidden_size=width,
        wire_dtype=transport.dtype,
        run_id=agreed_run_id(),
    )
    pool = TeacherPool(
        store,
        identity,
        timeout=transport.timeout,
        teacher_wait=transport.teacher_wait,
        bind=config.launch.bind,
        secret=secret,
        leader=rank == 0,
        rank=rank,
        ranks=config.student.ranks,
        links=transport.links_per_rank,
        mixed=transport.mixed_teachers,
        device=device,
        backend=transport.backend,
        on_event=log,
    )
    try:
        if wait:
            log(f"waiting for a teacher (at most {transport.teacher_wait:g} s)")
            pool.wait_for_teacher()
    except TeachersLost as lost:
        raise SavedAndResumable(f"{lost}; nothing was lost: start a teacher, then go on with --resume auto") from lost

    def ring_of(requests: Iterator, rows: int | None = None) -> HiddenStateRing:
        if rows is not None:
            return HiddenStateRing(requests, 1, rows, width, transport.dtype, pool)
        rows = config.train.micro_batch_sequences * config.data.sequence_length
        return HiddenStateRing(requests, transport.ring_depth, rows, width, transport.dtype, pool)

    return RemoteSource(ring_of, items, device, asked), pool
