"""What is written aside replaces the old in one step, or leaves it alone."""

import os
import subprocess
import sys

import pytest

from disaggkd_cli.files import replacing, write_text


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_whole(tmp_path, durable):
    path = tmp_path / "a.json"
    write_text(path, "old", durable=durable)
    with replacing(path, durable=durable) as aside:
        aside.write_text("new ä", encoding="utf-8")
        assert path.read_text() == "old"
        assert aside.parent == path.parent and aside.name.startswith(".")
    assert path.read_text(encoding="utf-8") == "new ä"
    assert [one.name for one in tmp_path.iterdir()] == ["a.json"]


def test_a_failure_leaves_the_old_and_nothing_else(tmp_path):
    path = tmp_path / "a.json"
    write_text(path, "old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as aside:
        aside.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    with pytest.raises(FileNotFoundError), replacing(path):
        pass  # nothing was written
    assert [one.name for one in tmp_path.iterdir()] == ["a.json"]


def test_a_directory_is_replaced_with_what_it_holds(tmp_path):
    path = tmp_path / "export"
    for name in ("first", "second"):
        with replacing(path) as aside:
            aside.mkdir()
            (aside / name).write_text(name)
    assert [one.name for one in path.iterdir()] == ["second"]
    with pytest.raises(OSError), replacing(path) as aside:
        aside.mkdir()
        (aside / "third").write_text("x")
        raise OSError("full")
    assert [one.name for one in path.iterdir()] == ["second"]
    assert [one.name for one in tmp_path.iterdir()] == ["export"]


def test_what_an_earlier_process_left_is_no_obstacle(tmp_path):
    path = tmp_path / "export"
    with replacing(path) as aside:
        pass_name = aside
        aside.mkdir()
    pass_name.mkdir()
    (pass_name / "left").write_text("x")
    with replacing(path) as aside:
        aside.mkdir()
        (aside / "new").write_text("y")
    assert [one.name for one in path.iterdir()] == ["new"]


def test_what_a_dead_process_left_is_removed_and_a_live_ones_stays(tmp_path):
    path = tmp_path / "status.json"
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for number in (dead.pid, os.getppid()):
        (tmp_path / f".status.json.{number}.writing").write_text("half")
    write_text(path, "whole")
    assert {one.name for one in tmp_path.iterdir()} == {"status.json", f".status.json.{os.getppid()}.writing"}
