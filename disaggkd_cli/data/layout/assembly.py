"""From the tokenised documents of each source to the two splits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from disaggkd_cli.data.layout.dataset import Allocate, TokenizedDataset, in_memory, lay_out
from disaggkd_cli.data.layout.fitting import drop_long
from disaggkd_cli.data.layout.flat_documents import TokenizedDocuments
from disaggkd_cli.data.layout.holding_out import hold_out, without_copies
from disaggkd_cli.data.notes import Notes
from disaggkd_cli.data.prompts_alone import refuse_to_hold_out
from disaggkd_cli.data.read.source_files import SourceFiles
from disaggkd_cli.data.refusals import refuse_many
from disaggkd_cli.errors import UserError

TokensOf = Callable[[SourceFiles, Notes], TokenizedDocuments]
"""The documents of a source that have a supervised token; what is noticed goes to the notes."""


@dataclass(frozen=True)
class Assembly:
    """What the splits are made of; where the tokens come from and where the splits go to is the caller's matter."""

    train: list[SourceFiles]
    weights: tuple[int, ...]
    evaluation: list[SourceFiles] | float
    """Sources of their own, or the fraction to hold out of each training source."""
    settings: dict[str, Any]
    seed: int

    @property
    def sources(self) -> list[SourceFiles]:
        """All of them."""
        return [*self.train, *(self.evaluation if isinstance(self.evaluation, list) else [])]

    def splits(
        self, tokens_of: TokensOf, allocate_train: Allocate = in_memory, allocate_evaluation: Allocate = in_memory
    ) -> tuple[TokenizedDataset, TokenizedDataset]:
        """(sequences to train on, held-out sequences).

        Raises:
            UserError: see `load_splits`.
        """
        train_notes, evaluation_notes = Notes(), Notes()
        train = [self._fitting(source, tokens_of, train_notes) for source in self.train]
        if isinstance(self.evaluation, list):
            held = [self._fitting(source, tokens_of, evaluation_notes) for source in self.evaluation]
        else:
            for source in self.train:
                refuse_to_hold_out(train_notes, source.key)
            pairs = [hold_out(documents, self.evaluation, self.seed, evaluation_notes) for documents in train]
            held = [each for _, each in pairs]
            train = without_copies([each for each, _ in pairs], held, self.seed, evaluation_notes)
        laid = lay_out(train, "data.train", self.settings, train_notes, allocate=allocate_train)
        if len(self.train) > 1:
            laid = replace(laid, weights=self.weights, names=tuple(source.name for source in self.train))
        laid = replace(laid, length_bucketing=self.settings.get("length_bucketing", False))
        return laid, lay_out(
            held, "data.eval", self.settings, evaluation_notes, shuffle_seed=self.seed, allocate=allocate_evaluation
        )

    def held_out(self, tokens_of: TokensOf) -> TokenizedDataset:
        """The held-out sequences alone, where they have sources of their own."""
        notes = Notes()
        held = [self._fitting(source, tokens_of, notes) for source in self.evaluation]
        return lay_out(held, "data.eval", self.settings, notes, shuffle_seed=self.seed)

    def _fitting(self, source: SourceFiles, tokens_of: TokensOf, notes: Notes) -> TokenizedDocuments:
        documents = tokens_of(source, notes)
        refuse_many(notes, source.key, len(documents))
        if not len(documents):
            raise UserError(
                f"{source.key}: no document of {source.files[0].path} has a supervised token: texts need two tokens, "
                "prompts a completion, conversations an assistant's turn (the student gives them its own only with "
                "on_policy.fraction=1)"
            )
        return drop_long(documents, source.key, self.settings, notes)
