"""From the `data` section of a config and a tokenizer to sequences for training and for evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disaggkd_cli.config.source_names import HELD_OUT_SPLIT
from disaggkd_cli.data.keep.build import CachedBuild
from disaggkd_cli.data.keep.cache import WORTH_CACHING, Cache, default_directory
from disaggkd_cli.data.keep.dataset_directory import with_notes
from disaggkd_cli.data.layout.assembly import Assembly
from disaggkd_cli.data.layout.dataset import TokenizedDataset
from disaggkd_cli.data.layout.flat_documents import TokenizedDocuments, join
from disaggkd_cli.data.layout.rows import LONG_DOCUMENTS
from disaggkd_cli.data.notes import Notes
from disaggkd_cli.data.order.mixing import whole_weights
from disaggkd_cli.data.order.training_texts import TrainingTexts
from disaggkd_cli.data.read.readers import TEXT_DOCUMENTS
from disaggkd_cli.data.read.records import RECORD_KINDS
from disaggkd_cli.data.read.source_files import SourceFiles, held_out_beside, list_sources
from disaggkd_cli.data.stream.streaming import StreamedSource, stream
from disaggkd_cli.data.tokenise.encoding import DocumentEncoder, EncodedDocument
from disaggkd_cli.data.tokenise.token_batches import Progress, tokenise, workers_of
from disaggkd_cli.data.tokenise.vocabulary import tokenizer_fingerprint
from disaggkd_cli.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class Splits:
    """The sequences to train on and those held out; no document is in both."""

    train: TrainingTexts
    evaluation: TokenizedDataset


def load_splits(
    data_config: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    pack: bool,
    seed: int,
    progress: Progress | None = None,
    prompts: bool = False,
) -> Splits:
    """Read, tokenise, split and lay out the data, or map what an earlier run, or another rank, has kept of it.

    Args:
        data_config: the `data` section; what it lacks takes the defaults, but there is no cache then.
        tokenizer: a transformers tokenizer.
        pack: several documents in a row (only where the model keeps them apart), or one.
        seed: decides which documents are held out.
        progress: see `Progress`.
        prompts: whether prompts may stand alone in what is trained on, since the student completes each of them.

    Raises:
        UserError: anything about the files or the settings that the user must mend.
        RunError: a worker process died, or another process that builds the same does not get on.
    """
    settings = _settings(data_config)
    encoder = DocumentEncoder(
        tokenizer,
        _chat_template(getattr(data_config, "chat_template", None)),
        getattr(data_config, "template_arguments", None),
    )
    found = Notes()
    train, evaluation = named_sources(data_config, found, prompts)
    weights = whole_weights([source.weight for source in train])
    settings |= {"pack": pack, "tokenizer": tokenizer_fingerprint(tokenizer)}
    if len(train) > 1:
        settings["weights"] = list(weights)
    if not pack and getattr(data_config, "length_bucketing", True):
        settings["length_bucketing"] = True
    sources = [*train, *(evaluation if isinstance(evaluation, list) else [])]
    size = sum(sum(source.sizes) for source in sources)
    streaming = getattr(data_config, "streaming", False)
    cache = None if streaming else _cache(getattr(data_config, "cache", None), size, progress, found)
    workers = workers_of(getattr(data_config, "workers", 1), size)
    assembly = Assembly(train, weights, evaluation, settings, seed)
    if streaming:
        splits = _stream(assembly, encoder, int(data_config.shuffle_tokens), progress)
    elif cache is not None:
        splits = CachedBuild(cache, encoder, settings["tokenizer"], workers).splits(assembly, found)
    else:
        splits = assembly.splits(lambda source, notes: _tokens_in_memory(source, encoder, workers, notes, progress))
    return Splits(with_notes(splits[0], found.lines()), splits[1])


def named_sources(
    data_config: Any, notes: Notes, prompts: bool = False
) -> tuple[list[SourceFiles], list[SourceFiles] | float]:
    """The sources to train on, and those to evaluate on or the fraction to hold out; `prompts` as in `load_splits`.

    Raises:
        UserError: see `list_sources`; a file is in both.
    """
    reading = _settings(data_config) | {"columns": getattr(data_config, "columns", {})}
    train = [
        replace(source, prompts=prompts) for source in list_sources(data_config.train, "data.train", reading, notes)
    ]
    evaluation: list[SourceFiles] | float
    if data_config.eval == HELD_OUT_SPLIT:
        evaluation = held_out_beside(data_config.train, reading, notes)
    elif isinstance(data_config.eval, (str, dict, list)):
        evaluation = list_sources(data_config.eval, "data.eval", reading, notes, held_out=True)
    else:
        evaluation = float(data_config.eval)
    _refuse_overlap(train, evaluation)
    return train, evaluation


def _stream(
    assembly: Assembly, encoder: DocumentEncoder, shuffle_tokens: int, progress: Progress | None
) -> tuple[TrainingTexts, TokenizedDataset]:
    if not isinstance(assembly.evaluation, list):
        raise UserError(
            "data.eval: a stream is not read to its end before training, so no fraction of it can be held out; name a "
            "file of its own, or set data.streaming=false"
        )
    sources = [
        StreamedSource(source, encoder, assembly.settings, number, shuffle_tokens)
        for number, source in enumerate(assembly.train)
    ]
    train = stream(sources, assembly.weights, assembly.settings.get("length_bucketing", False))
    return train, assembly.held_out(lambda source, notes: _tokens_in_memory(source, encoder, 1, notes, progress))


def _settings(data_config: Any) -> dict[str, Any]:
    """The settings that decide what sequences come out, checked."""
    choices = {"long_documents": LONG_DOCUMENTS, "records": RECORD_KINDS, "text_documents": TEXT_DOCUMENTS}
    settings = {key: getattr(data_config, key, allowed[0]) for key, allowed in choices.items()}
    for key, allowed in choices.items():
        if settings[key] not in allowed:
            raise UserError(f"data.{key}: {settings[key]} is none of {', '.join(allowed)}")
    if data_config.sequence_length < 2:
        raise UserError(f"data.sequence_length: {data_config.sequence_length} leaves no next token; at least 2")
    return settings | {"sequence_length": int(data_config.sequence_length), "format": data_config.format}


def _chat_template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.chat_template: {path} can't be read ({error})") from error


def _refuse_overlap(train: list[SourceFiles], evaluation: list[SourceFiles] | float) -> None:
    seen = {(file.path.resolve(), file.split, file.config) for source in train for file in source.files}
    for source in evaluation if isinstance(evaluation, list) else []:
        for file in source.files:
            if (file.path.resolve(), file.split, file.config) in seen:
                raise UserError(
                    f"data.eval: {file.path} is trained on as well (data.train); name another file, or a fraction"
                )


def _cache(setting: str | None, texts_bytes: int, progress: Progress | None, notes: Notes) -> Cache | None:
    if setting is None or (setting == "auto" and texts_bytes < WORTH_CACHING):
        return None
    if setting != "auto":
        return Cache(Path(setting).expanduser(), progress)
    try:
        return Cache(default_directory(), progress)
    except (UserError, RuntimeError) as error:  # there may not even be a home
        notes.add(f"nothing is kept for the next run, and every rank holds all tokens in memory: {error}")
        return None


def _tokens_in_memory(
    source: SourceFiles, encoder: DocumentEncoder, workers: int, notes: Notes, progress: Progress | None
) -> TokenizedDocuments:
    def documents() -> Iterator[EncodedDocument]:
        done = 0
        for batch in tokenise(source, encoder, workers=workers):
            yield from batch.documents
            notes.merge(batch.notes)
            done += batch.read
            if progress and (batch.read or batch.documents):
                progress(f"tokenising {source.key}", done, batch.share)

    return join(documents())
