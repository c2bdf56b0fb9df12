"""`--overwrite`: whom it asks, and what it refuses."""

import io

import pytest

from disaggkd_cli import jobs
from disaggkd_cli.config import Config
from disaggkd_cli.errors import UserError
from disaggkd_cli.training.run_directory import Status, prepare
from tests.support.runs import write_config


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def finished(tmp_path):
    directory = prepare(tmp_path / "run", "", resume=False)
    Status("finished", last_step=20).write(directory)
    return directory


def delete(directory, monkeypatch, answer=None):
    """Ask for the deletion, with a person that answers at a terminal or without one; return what was asked."""
    asked = Terminal() if answer is not None else io.StringIO()
    monkeypatch.setattr("sys.stdin", Terminal(answer) if answer is not None else io.StringIO())
    monkeypatch.setattr("sys.stderr", asked)
    jobs._delete_earlier(Config(run_dir=str(directory.root)))
    return asked.getvalue()


def test_without_a_terminal_it_is_done(finished, monkeypatch):
    assert delete(finished, monkeypatch) == ""
    assert not finished.status.exists()


def test_on_a_terminal_a_person_says_yes(finished, monkeypatch):
    assert "holds a run (finished after step 20). Delete it? [y/N]" in delete(finished, monkeypatch, "y\n")
    assert not finished.status.exists()


@pytest.mark.parametrize("answer", ["\n", "", "n\n", "what?\n"])
def test_anything_but_yes_deletes_nothing(finished, monkeypatch, answer):
    with pytest.raises(UserError, match="nothing was deleted"):
        delete(finished, monkeypatch, answer)
    assert finished.status.exists()


def test_it_does_not_go_with_resume(tmp_path):
    config = str(write_config(tmp_path / "run.yaml", run_dir=str(tmp_path / "run")))
    with pytest.raises(UserError, match="--overwrite and --resume auto"):
        jobs.run_job("run", config, [], "auto", 3, False, False, overwrite=True)
