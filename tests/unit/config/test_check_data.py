"""The data section: several sources, streaming, cache."""

import pytest

from disaggkd_cli.config import load
from disaggkd_cli.errors import UserError


def problems(path, text, running=False):
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load(path, running=running)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


@pytest.mark.parametrize(
    "train",
    ["[{path: a, weight: 3}, {path: b}]", "{chats: {path: a, weight: 0.5, format: jsonl}, books: b}", "[a, b]", "a"],
)
def test_one_source_or_several_are_understood(tmp_path, train):
    (tmp_path / "run.yaml").write_text(f"data: {{train: {train}}}")
    loaded = load(tmp_path / "run.yaml")
    assert loaded.data.train and loaded.data.cache == "auto" and loaded.data.length_bucketing


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ("{train: 3}", "data.train: 3 must be a path, or a list or mapping of sources with path and weight"),
        ("{train: [{weight: 1}]}", "data.train[1].path: is required"),
        ("{train: [3]}", "data.train[1]: 3 must be a path, or a mapping with path and weight"),
        ("{train: {a: {path: x, wieght: 1}}}", "data.train[a].wieght: there is no such key; did you mean weight?"),
        ("{train: [{path: x, weight: 0}]}", "data.train[1].weight: 0 must be a number above 0"),
        ("{train: [{path: x, weight: much}]}", "data.train[1].weight: 'much' must be a number above 0"),
        ("{train: [{path: x, weight: .inf}]}", "data.train[1].weight: inf must be a number above 0"),
        ("{train: [{path: x, records: chat}]}", "data.train[1].records: 'chat' is not known; there are auto, text"),
        ("{workers: 0}", "data.workers: 0 must be auto or a number of processes, at least 1"),
        ("{workers: many}", "data.workers: 'many' must be auto or a number of processes, at least 1"),
        ("{shuffle_tokens: 0}", "data.shuffle_tokens: 0 must be at least 1"),
        ("{streaming: true}", "data.eval: a stream is not read to its end before training"),
        ("{streaming: true, eval: 0}", "data.eval: 0 must be a fraction between 0 and 1, or a path"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, data, problem):
    assert any(problem in line for line in problems(tmp_path / "run.yaml", f"data: {data}"))


def test_paths_of_all_sources_are_looked_for(tmp_path):
    (tmp_path / "novels.txt").write_text("x")
    text = f"data: {{train: [{{path: {tmp_path}/novel.txt}}, {tmp_path}/novels.txt, 'builtin:bible'], eval: no.txt}}"
    found = "\n".join(problems(tmp_path / "run.yaml", text, running=True))
    assert f"data.train[1]: {tmp_path}/novel.txt does not exist; did you mean {tmp_path}/novels.txt?" in found
    assert "data.train[3]: builtin:bible is not known; there is builtin:pydoc" in found
    assert "data.eval: no.txt does not exist" in found and "data.train[2]" not in found
