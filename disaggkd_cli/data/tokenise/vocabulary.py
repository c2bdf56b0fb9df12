"""Load a tokenizer, name its state by a hash, and compare two of them id by id."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from disaggkd_cli.errors import UserError

SHOWN_DIFFERENCES = 5


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token id that fills short rows up; padding is never supervised, so any id does."""
    pad = tokenizer.pad_token_id
    return pad if pad is not None else tokenizer.eos_token_id or 0


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a local directory, of a GGUF file, or of a hub name. Code that comes with it is never run.

    Raises:
        UserError: nothing there, no tokenizer in it, or one that this transformers can't read.
    """
    path = Path(source).expanduser()
    options: dict = {"trust_remote_code": False}
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"tokenizer: there is no file {source}")
        name, options["gguf_file"] = str(path.parent), path.name
    elif path.is_dir():
        name, options["local_files_only"] = str(path), True
    elif path.exists():
        raise UserError(f"tokenizer: {source} is a file; name the directory of the model, or a .gguf file")
    elif path.is_absolute() or str(source).startswith((".", "~")):
        raise UserError(f"tokenizer: there is no directory {source}")
    else:
        name = str(source)
    try:
        return AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as error:
        # The many faces of "no tokenizer here": transformers has no error of its own for it.
        where = "in that directory" if path.exists() else "there, nor a directory of that name here"
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"tokenizer: found none that can be read {where}: {source} ({reason}). "
            "A model directory needs tokenizer.json and tokenizer_config.json beside its weights."
        ) from error


def tokens_by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Id → token, added tokens included."""
    return {index: token for token, index in tokenizer.get_vocab().items()}


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 (hex) over all that decides which ids a text becomes: id → token, merges, normaliser, pre-tokenizer,
    special tokens. The chat template is not part of it; its effect is in the ids of the data."""
    state: dict = {
        "tokens": sorted(tokens_by_id(tokenizer).items()),
        "special": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id],
    }
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        # Padding and truncation change with every call that asks for them.
        state["backend"] = {key: value for key, value in backend.items() if key not in ("padding", "truncation")}
    return hashlib.sha256(json.dumps(state, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def compare_vocabularies(teacher_tokenizer: PreTrainedTokenizerBase, student_tokenizer: PreTrainedTokenizerBase) -> int:
    """How many ids, counted from 0, mean the same token to both; beyond them only one side has tokens.

    Raises:
        UserError: an id within that range means different tokens (or a token to one side alone); names the first few.
    """
    teacher, student = tokens_by_id(teacher_tokenizer), tokens_by_id(student_tokenizer)
    if not teacher or not student:
        raise UserError(f"the tokenizer of the {'student' if teacher else 'teacher'} has no tokens")
    shared = min(max(teacher), max(student)) + 1
    different = [index for index in range(shared) if teacher.get(index) != student.get(index)]
    if not different:
        return shared

    def name(token: str | None) -> str:
        return "no token" if token is None else repr(token)

    examples = "; ".join(
        f"id {index} is {name(teacher.get(index))} to the teacher and {name(student.get(index))} to the student"
        for index in different[:SHOWN_DIFFERENCES]
    )
    more = f"; and {len(different) - SHOWN_DIFFERENCES} more" if len(different) > SHOWN_DIFFERENCES else ""
    raise UserError(
        f"teacher.model and student.model have different vocabularies: {len(different)} of {shared} shared ids differ. "
        f"{examples}{more}. "
        "Distillation compares probabilities id by id: take a teacher and a student of one tokenizer."
    )
