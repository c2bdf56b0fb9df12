"""Vocabulary, labels and masks: is the right token asked of the student, and of no other position?"""

from __future__ import annotations

import numpy as np

from disaggkd_cli.checks.result import FAIL, CheckResult, judge
from disaggkd_cli.checks.subject import Subject
from disaggkd_cli.data import IGNORE, Sequence, TokenizedDataset, compare_vocabularies
from disaggkd_cli.errors import UserError
from disaggkd_cli.models import head_of, verify_ids

SHOWN_SAMPLES = 3
_SHOWN_TOKENS = 120
_INCOMPLETE = "\ufffd"
"""What a decoder writes for the first bytes of a letter whose last ones are missing."""


def check_vocabulary(subject: Subject) -> CheckResult:
    """Compare the tokenizers id by id, the heads' sizes with them, and the ids of all texts with what both know."""
    sizes = (subject.teacher_head.weight.shape[0], head_of(subject.student).weight.shape[0])
    try:
        shared = compare_vocabularies(subject.teacher_tokenizer, subject.tokenizer)
        for dataset in (subject.splits.train.sample, subject.splits.evaluation):
            largest = verify_ids(dataset.input_ids, dataset.labels, shared, sizes)
    except UserError as error:
        return CheckResult(FAIL, f"heads of {sizes[0]:,} and {sizes[1]:,} ids", str(error))
    extra = f"; ids beyond {min(sizes) - 1:,} are masked out exactly" if sizes[0] != sizes[1] else ""
    figure = f"{shared:,} shared ids; heads of {sizes[0]:,} and {sizes[1]:,}"
    why = f"tokenizers compared id by id; the texts use ids up to {largest:,}{extra}"
    return judge(True, figure, why, "", shared_ids=shared, teacher_head_ids=sizes[0], student_head_ids=sizes[1])


def check_labels(subject: Subject) -> CheckResult:
    """Compare every label of the data set, and of the sampled micro-batch, with the token that follows it."""
    checked = wrong = 0
    for dataset in (subject.splits.train.sample, subject.splits.evaluation):
        some, bad = _wrong_labels(dataset)
        checked, wrong = checked + some, wrong + bad
    batch = subject.batch
    for row, (sequence_length, lengths) in enumerate(zip(_lengths(subject), batch.document_lengths, strict=True)):
        ids, labels = batch.input_ids[row].cpu().numpy(), batch.labels[row].cpu().numpy()
        lengths = (*lengths[:-1], lengths[-1] - (len(ids) - sequence_length))  # without the padding
        some, bad = _wrong_in_row(ids, labels, np.asarray(lengths))
        checked, wrong = checked + some, wrong + bad
    return judge(
        wrong == 0,
        f"{checked - wrong:,} of {checked:,} labels are the next token",
        "each supervised label against the token after it",
        f"{wrong:,} labels are not the token that follows in their document, so the student would learn something else",
        labels=checked,
        wrong=wrong,
    )


def _wrong_labels(dataset: TokenizedDataset) -> tuple[int, int]:
    """Return how many labels could be compared with a following token, and how many differ from it."""
    ids, labels = dataset.input_ids, dataset.labels
    document_ends = np.cumsum(dataset.document_lengths) - 1
    # A row's last label may be the token at which a long text was cut, which stands in another row.
    compared = labels != IGNORE
    row_ends = dataset.sequence_ends - 1
    inner_ends = np.setdiff1d(document_ends, row_ends)
    across = int(compared[inner_ends].sum())
    compared[document_ends] = False
    following = np.append(ids[1:], -1)
    return int(compared.sum()) + across, int((labels != following)[compared].sum()) + across


def _wrong_in_row(ids: np.ndarray, labels: np.ndarray, lengths: np.ndarray) -> tuple[int, int]:
    ends = np.cumsum(lengths) - 1
    compared = labels != IGNORE
    compared[ends] = False
    following = np.append(ids[1:], -1)
    return int(compared.sum()), int((labels != following)[compared].sum())


def check_masks(subject: Subject) -> CheckResult:
    """Take three samples to show what is supervised; refuse supervised padding and targets beyond a document's end."""
    train = subject.splits.train.sample
    share = float(train.supervised_counts.sum()) / max(1, train.token_count)
    batch = subject.batch
    padded = 0
    for row, (sequence_length, lengths) in enumerate(zip(_lengths(subject), batch.document_lengths, strict=True)):
        padded += int((batch.labels[row, sequence_length:] != IGNORE).sum())
        if len(lengths) > 1:
            ends = np.cumsum(lengths)[:-1] - 1
            padded += int((batch.labels[row, ends[ends < sequence_length - 1]] != IGNORE).sum())
    samples = [
        {"segments": segments(subject.tokenizer, train.sequence(index)), "sequence": index}
        for index in np.linspace(0, len(train) - 1, min(SHOWN_SAMPLES, len(train))).astype(int).tolist()
    ]
    return judge(
        padded == 0,
        f"{share:.1%} of {train.token_count:,} tokens are supervised",
        f"{len(samples)} samples are shown above: look whether what is marked is what the student shall say",
        f"{padded} positions of padding, or targets in another document, are supervised",
        supervised_share=share,
        samples=samples,
    )


def _lengths(subject: Subject) -> list[int]:
    """Return the tokens of each row of the sampled micro-batch, padding not counted."""
    ids = subject.batch.input_ids.cpu().numpy()
    found = []
    for row in ids:
        fitting = [s for s in subject.sequences if np.array_equal(row[: len(s)], s.input_ids)]
        found.append(max(map(len, fitting), default=len(row)))
    return found


def segments(tokenizer, sequence: Sequence) -> list[tuple[str, bool]]:
    """Return a sequence as text, cut where supervision begins or ends: `(text, supervised)`.

    A token is supervised when it is the label of the position before it. Long sequences are shown around the place
    where supervision first changes; `…` stands for what is left out.
    """
    supervised = np.concatenate([[False], sequence.labels[:-1] != IGNORE])
    changes = np.flatnonzero(np.diff(supervised)) + 1
    middle = int(changes[1]) if len(changes) > 1 and changes[0] == 1 else int(changes[0]) if len(changes) else 0
    begin = max(0, min(middle - _SHOWN_TOKENS // 2, len(sequence) - _SHOWN_TOKENS))
    end = min(len(sequence), begin + _SHOWN_TOKENS)
    cuts = [begin, *(int(change) for change in changes if begin < change < end), end]
    found = [("… ", False)] if begin else []
    for start, stop in zip(cuts, cuts[1:], strict=False):
        found.append((_text(tokenizer, sequence.input_ids, begin, start, stop, end), bool(supervised[start])))
    return [*found, (" …", False)] if end < len(sequence) else found


def _text(tokenizer, ids: np.ndarray, begin: int, start: int, stop: int, end: int) -> str:
    """Return the text of ids[start:stop] as it reads after ids[begin:start]; a letter cut in two goes to the latter."""

    def decode(first: int, last: int) -> str:
        text = tokenizer.decode(ids[first:last].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text if last == end else text.rstrip(_INCOMPLETE)

    before, through = decode(begin, start), decode(begin, stop)
    return through[len(before) :] if through.startswith(before) else decode(start, stop)
