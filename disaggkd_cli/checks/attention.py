"""Does a document see its neighbours, its padding, or chance?"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from disaggkd_cli.checks.result import CheckResult, judge
from disaggkd_cli.checks.subject import Subject
from disaggkd_cli.data import MicroBatch, Sequence, collate
from disaggkd_cli.models import backbone_of, hidden_states, leak_tolerance, relative_difference

_DOCUMENTS = 3
_DOCUMENT_TOKENS = 32


def check_packing(subject: Subject) -> CheckResult:
    """Compare real documents in one row (or beside padding) with themselves alone, and with changed neighbours."""
    documents = _documents(subject)
    found = {}
    for name, model in (("teacher", subject.teacher), ("student", subject.student)):
        found[name] = _leak(subject, backbone_of(model), documents)
    tolerances = {
        "teacher": leak_tolerance(next(subject.teacher.parameters()).dtype),
        "student": leak_tolerance(torch.float32),
    }
    passed = all(found[name] <= tolerances[name] for name in found)
    figures = ", ".join(f"{name} {value:.1e}" for name, value in found.items())
    if subject.pack:
        compared = f"{len(documents)} documents of the texts in one row, against each alone and with changed neighbours"
        blame = "documents that share a row see each other; set data.packing=off"
    else:
        compared = f"one document per row ({subject.pack_reason}); rows with padding against rows without"
        blame = "padding on the right changes what stands before it, so the model is not causal"
    return judge(passed, figures, compared, blame, packed=subject.pack, **found)


def _documents(subject: Subject) -> list[np.ndarray]:
    """Return a few real documents, cut short, of lengths that differ."""
    found: list[np.ndarray] = []
    for sequence in subject.sequences:
        ends = np.cumsum(sequence.document_lengths)
        for start, end in zip(ends - np.asarray(sequence.document_lengths), ends, strict=True):
            ids = np.asarray(sequence.input_ids[start : min(end, start + _DOCUMENT_TOKENS - 5 * len(found))])
            if len(ids) > 1 and len(found) < _DOCUMENTS:
                found.append(ids)
    return found


@torch.no_grad()
def _leak(subject: Subject, backbone: nn.Module, documents: list[np.ndarray]) -> float:
    batches = [_packed(documents, subject.pad_id)] if subject.pack else [_padded(documents, subject.pad_id)]
    if subject.pack:
        others = [(ids + 1) % (int(ids.max()) + 1) for ids in documents[:-1]]
        batches.append(_packed([*others, documents[-1]], subject.pad_id))
    states = []
    for batch in batches:
        batch = batch.to(subject.device)
        states.append(hidden_states(backbone, batch.input_ids, batch.position_ids))
    first, worst, start = states[0], 0.0, 0
    for number, ids in enumerate(documents):
        alone = hidden_states(
            backbone,
            torch.from_numpy(ids.astype(np.int64))[None].to(subject.device),
            torch.arange(len(ids), device=subject.device)[None],
        )[0]
        mine = first[0, start : start + len(ids)] if subject.pack else first[number, : len(ids)]
        worst = max(worst, relative_difference(mine, alone))
        start += len(ids)
    if len(states) > 1:
        last = len(documents[-1])
        worst = max(worst, relative_difference(states[1][0, -last:], first[0, -last:]))
    return worst


def _packed(documents: list[np.ndarray], pad_id: int) -> MicroBatch:
    ids = np.concatenate(documents).astype(np.int32)
    return collate([Sequence(ids, np.full(len(ids), -100, np.int32), tuple(map(len, documents)))], pad_id)


def _padded(documents: list[np.ndarray], pad_id: int) -> MicroBatch:
    rows = [Sequence(ids, np.full(len(ids), -100, np.int32), (len(ids),)) for ids in documents]
    return collate(rows, pad_id)


@torch.no_grad()
def check_determinism(subject: Subject) -> CheckResult:
    """Ask the teacher the same twice, and once more among other rows of a batch."""
    backbone, batch = backbone_of(subject.teacher), subject.batch
    first = hidden_states(backbone, batch.input_ids, batch.position_ids)
    again = hidden_states(backbone, batch.input_ids, batch.position_ids)
    alone = hidden_states(backbone, batch.input_ids[:1], batch.position_ids[:1])
    twice = ((first - again).double().norm() / first.double().norm().clamp_min(1e-30)).item()
    mates = relative_difference(alone[0], first[0])
    tolerance = leak_tolerance(first.dtype)
    training = [name or "the model" for name, module in subject.teacher.named_modules() if module.training]
    same = "bitwise equal" if torch.equal(first, again) else f"differs by {twice:.1e}"
    neighbours = "bitwise equal" if mates == 0 else f"{mates:.1e}"
    blame = "the teacher gives other answers to the same question, so a restarted or second replica would not fit"
    if training:
        blame = f"the teacher is in train mode ({training[0]}), where dropout makes states random"
    return judge(
        twice <= tolerance / 10 and mates <= tolerance and not training,
        f"twice: {same}; among other rows: {neighbours}",
        f"the same {batch.input_ids.numel()} tokens asked twice, and the first row alone",
        blame,
        twice=twice,
        other_rows=mates,
        tolerance=tolerance,
    )
