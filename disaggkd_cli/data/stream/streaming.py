"""Texts that are tokenised while training goes on: nothing is kept but one window of them.

A source is cut into windows of about `shuffle_tokens` tokens: whole batches of documents that follow one another. Each
window is laid out by itself and its sequences are shuffled; then comes the next, and after the last the first again, as
the next epoch. Where windows begin is decided by the texts alone, so the stream is one fixed sequence of sequences:
every rank reads all of it and takes its part, and a resumed run goes on exactly where it was. Where each window began
is remembered in the run's directory, so that resuming reads on from there; without that it reads from the beginning. A
text that goes on in the next window loses the one label that stands there.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from disaggkd_cli.data.layout.dataset import TokenizedDataset, lay_out
from disaggkd_cli.data.layout.fitting import drop_long
from disaggkd_cli.data.layout.flat_documents import join
from disaggkd_cli.data.layout.micro_batch import Sequence
from disaggkd_cli.data.notes import Notes
from disaggkd_cli.data.order.bucketing import WINDOW_BATCHES, order_by_length
from disaggkd_cli.data.order.mixing import Mixture
from disaggkd_cli.data.order.shuffle import permutation
from disaggkd_cli.data.read.source_files import SourceFiles
from disaggkd_cli.data.refusals import refuse_many
from disaggkd_cli.data.stream.window_index import StreamIndex, WindowStart
from disaggkd_cli.data.tokenise.encoding import DocumentEncoder
from disaggkd_cli.data.tokenise.token_batches import Position, TokenBatch, tokenise
from disaggkd_cli.errors import UserError

logger = logging.getLogger("disaggkd")


@dataclass(frozen=True)
class StreamedSequence:
    """One sequence of a window that is in memory."""

    window: TokenizedDataset
    index: int

    def __len__(self) -> int:
        ends = self.window.sequence_ends
        return int(ends[self.index] - (ends[self.index - 1] if self.index else 0))

    @property
    def supervised(self) -> int:
        """Its supervised tokens."""
        return int(self.window.supervised_counts[self.index])


@dataclass
class StreamedSource:
    """The endless sequences of one source."""

    source: SourceFiles
    encoder: DocumentEncoder
    settings: dict[str, Any]
    number: int
    """Which source of the mixture it is."""
    shuffle_tokens: int
    check: Callable[[np.ndarray, np.ndarray], Any] | None = None
    """Called with the ids and labels of each window."""
    index: StreamIndex | None = None

    def first_window(self, notes: Notes) -> TokenizedDataset:
        """The first window that holds a sequence; what is noticed up to there goes to `notes`."""
        return next(window for _, window in self._windows(WindowStart(), notes) if window is not None)

    def sequences(self, first: int, seed: int, ahead: Executor) -> Iterator[StreamedSequence]:
        """Yield the sequences from position `first` on, without end; `ahead` lays out the next window meanwhile.

        Raises:
            UserError: a file can't be read or is broken, or a whole epoch holds nothing to train on.
        """
        start = self.index.find(first) if self.index else WindowStart()
        if first:
            logger.info("%s: sequence %d is looked for from %d on", self.source.key, first, start.first_sequence)
        windows = self._windows(start, None)
        coming = ahead.submit(next, windows)
        while True:
            begun, window = coming.result()
            coming = ahead.submit(next, windows)
            if self.index:
                self.index.remember(begun)
            if window is None or begun.first_sequence + len(window) <= first:
                continue
            order = permutation(len(window), seed, begun.number, purpose=f"stream of source {self.number}")
            for index in order[max(0, first - begun.first_sequence) :].tolist():
                yield StreamedSequence(window, index)

    def _windows(
        self, start: WindowStart, notes: Notes | None
    ) -> Iterator[tuple[WindowStart, TokenizedDataset | None]]:
        """Yield (its start, the window or None where it holds nothing), epoch after epoch."""
        while True:
            for batches, following in self._spans(start.position):
                window = self._lay_out(batches, notes)
                yield start, window
                start = start.after(0 if window is None else len(window), following)
            if start.first_sequence == start.first_of_epoch:
                raise UserError(
                    f"{self.source.key}: no document of {self.source.files[0].path} has a supervised token and fits "
                    f"into data.sequence_length={self.settings['sequence_length']}"
                )
            start = start.next_epoch()

    def _spans(self, position: Position) -> Iterator[tuple[list[TokenBatch], Position]]:
        """Yield the batches of each window from `position` to the source's end, and where the next one begins."""
        batches: list[TokenBatch] = []
        tokens = 0
        for batch in tokenise(self.source, self.encoder, position):
            batches.append(batch)
            tokens += sum(len(document.input_ids) for document in batch.documents)
            if tokens >= self.shuffle_tokens and batch.following is not None:
                yield batches, batch.following
                batches, tokens = [], 0
        if batches:
            yield batches, (len(self.source.files), (0, 0))

    def _lay_out(self, batches: list[TokenBatch], notes: Notes | None) -> TokenizedDataset | None:
        noticed = Notes()
        for batch in batches:
            noticed.merge(batch.notes)
        documents = join(document for batch in batches for document in batch.documents)
        if notes is not None:
            refuse_many(noticed, self.source.key, len(documents))
        if len(documents):
            documents = drop_long(documents, self.source.key, self.settings, noticed, under_way=notes is None)
        window = None
        if len(documents):
            window = lay_out([documents], self.source.key, self.settings, Notes())
            if self.check:
                self.check(window.input_ids, window.labels)
        if notes is not None:
            notes.merge(noticed)
        else:
            for line in noticed.lines():
                logger.info("%s", line)
        return window


@dataclass(frozen=True)
class StreamedBatch:
    """The sequences of one optimizer step over all ranks."""

    chosen: list[StreamedSequence]

    @property
    def supervised_rows(self) -> int:
        """Supervised rows of the whole step."""
        return sum(each.supervised for each in self.chosen)

    def sequences(self, start: int, stop: int) -> list[Sequence]:
        """Sequences start … stop - 1 of the batch."""
        return [each.window.sequence(each.index) for each in self.chosen[start:stop]]


@dataclass(frozen=True, eq=False)
class StreamedTexts:
    """Training texts of which one window of each source is in memory; see `TrainingTexts`."""

    sources: tuple[StreamedSource, ...]
    mixture: Mixture
    sample: TokenizedDataset
    """The first window of the first source, by which models and texts are checked before training."""
    fingerprint: str
    """sha256 (hex) over the settings, names and sizes of all files, and the tokens of the first windows."""
    notes: list[str]
    length_bucketing: bool

    @property
    def whole(self) -> None:
        """Never all at once."""
        return None

    def verify(self, check: Callable[[np.ndarray, np.ndarray], Any]) -> None:
        """Call `check` with the ids and labels of the first window now, and of each window when it is read."""
        check(self.sample.input_ids, self.sample.labels)
        for source in self.sources:
            source.check = check

    def remember_in(self, directory: Path, *, write: bool) -> None:
        """Remember in (and learn from) files of a directory where windows began."""
        for source in self.sources:
            path = directory / f"stream_{source.number}.jsonl"
            source.index = StreamIndex(path, self.fingerprint, write=write)

    def batches(self, seed: int, size: int, first_step: int) -> Iterator[StreamedBatch]:
        """Yield the batches of `size` sequences of steps first_step, first_step + 1, …, without end."""
        window = size * WINDOW_BATCHES if self.length_bucketing else size
        first = first_step * size // window * window
        stream = self._mixed(first, seed)
        skipped = first_step - first // size
        while True:
            chosen = list(islice(stream, window))
            if self.length_bucketing:
                lengths = np.asarray([len(each) for each in chosen])
                chosen = [chosen[index] for index in order_by_length(lengths, first, size, seed)]
            for start in range(skipped * size, window, size):
                yield StreamedBatch(chosen[start : start + size])
            first, skipped = first + window, 0

    def _mixed(self, first: int, seed: int) -> Iterator[StreamedSequence]:
        round_size = len(self.mixture.pattern)
        source, within = self.mixture.sources(first, round_size)
        # One thread for all sources: they share a tokenizer.
        ahead = ThreadPoolExecutor(1, thread_name_prefix="texts")
        try:
            streams = [
                each.sequences(int(within[source == number][0]), seed, ahead)
                for number, each in enumerate(self.sources)
            ]
            position = first
            while True:
                yield next(streams[int(self.mixture.pattern[position % round_size])])
                position += 1
        finally:
            ahead.shutdown(wait=False, cancel_futures=True)


def stream(sources: list[StreamedSource], weights: tuple[int, ...], length_bucketing: bool) -> StreamedTexts:
    """The mixed stream of some sources.

    Raises:
        UserError: see `StreamedSource.sequences`; and what `load_splits` raises of the first window.
    """
    notes = Notes()
    firsts = [source.first_window(notes) for source in sources]
    digest = hashlib.sha256(json.dumps([sources[0].settings, weights, sources[0].shuffle_tokens]).encode())
    for source, first in zip(sources, firsts, strict=True):
        files = [[file.path.name, size] for file, size in zip(source.source.files, source.source.sizes, strict=True)]
        digest.update(json.dumps([files, first.fingerprint]).encode())
    notes.add(
        f"data.train: streamed; sequences are shuffled among about {sources[0].shuffle_tokens:,} tokens that follow "
        f"one another, and each student rank tokenises all texts itself (first window: {len(firsts[0])} sequences, "
        f"{firsts[0].token_count} tokens, {firsts[0].supervised_counts.sum()} of them supervised)"
    )
    return StreamedTexts(
        sources=tuple(sources),
        mixture=Mixture.of(weights),
        sample=firsts[0],
        fingerprint=digest.hexdigest(),
        notes=notes.lines(),
        length_bucketing=length_bucketing,
    )
