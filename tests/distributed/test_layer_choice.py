"""A run whose student is `best_N` layers of its teacher: chosen once, the same on every rank and after a stop."""

import json

import pytest

from tests.support.runs import disaggkd, run_to_end, weights_sha256, write_config


@pytest.mark.slow
def test_two_ranks_settle_on_the_same_layers_and_a_stopped_run_keeps_them(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = write_config(
        tmp_path / "run.yaml",
        student__from_teacher={"layers": "best_2"},
        student__ranks=2,
        train__micro_batch_sequences=2,
        train__steps=4,
        train__save_every=2,
    )
    first = tmp_path / "first"
    code, output = disaggkd("run", str(config), f"run_dir={first}", "train.stop_at=2")
    assert code == 75, output
    assert output.count(" goes: ") == 2 and "best_2 is [" in output
    chosen = json.loads((first / "layers.json").read_text())["layers"]
    assert len(chosen) == 2

    # Were the choice made again, it would be read from this poisoned cache.
    for entry in (tmp_path / "cache" / "disaggkd").glob("layers-*.json"):
        entry.write_text(entry.read_text().replace(str(chosen), "[0, 1]"))
    code, output = disaggkd("run", str(config), f"run_dir={first}", "--resume", "auto")
    assert code == 0 and " goes: " not in output, output
    whole = run_to_end(config, tmp_path / "named", f"student.from_teacher.layers={chosen}")
    assert weights_sha256(first) == weights_sha256(whole)


def test_more_layers_than_there_are_is_the_users_to_mend(tmp_path):
    config = write_config(tmp_path / "run.yaml", student__from_teacher={"layers": "best_9"})
    code, output = disaggkd("run", str(config), f"run_dir={tmp_path / 'run'}")
    assert code == 2
    assert "best_9 is more than there are; the teacher has 4 layers" in output
