"""-q and -v of every command, Ctrl-C, and what help says."""

import pytest
import typer
from typer.testing import CliRunner

from disaggkd_cli import cli, verbosity
from disaggkd_cli.bench.commands import bench_app
from disaggkd_cli.errors import StoppedByHand, UserError

BENCHES = {"loss", "link", "step", "frontier"}


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch):
    monkeypatch.setenv("DISAGGKD_VERBOSITY", "")


def names(app: typer.Typer) -> list[str]:
    return [one.name or one.callback.__name__ for one in app.registered_commands]


@pytest.mark.parametrize("name", [*names(cli.app), *(f"bench {name}" for name in names(bench_app))])
def test_every_command_has_both_and_no_odd_brackets(name):
    text = CliRunner().invoke(cli.app, [*name.split(), "--help"], env={"COLUMNS": "200"}).output
    assert "--quiet" in text and "--verbose" in text
    assert "[[" not in text and "...}..." not in text
    assert text.count("<bool>") <= 1, "the one of --help, which typer writes itself"


def test_there_are_benches():
    assert set(names(bench_app)) == BENCHES


def run_with(arguments, body=lambda: None):
    app = typer.Typer()

    @verbosity.command(app)
    def only(name: str = "x") -> None:
        """Do something."""
        body()

    return CliRunner().invoke(app, arguments)


def test_the_choice_reaches_what_asks_for_it_and_what_is_started(monkeypatch, capsys):
    seen = []
    for arguments in ([], ["-q"], ["-v"]):
        monkeypatch.setenv("DISAGGKD_VERBOSITY", "")
        run_with(arguments, lambda: seen.append((verbosity.is_quiet(), verbosity.is_verbose())))
    assert seen == [(False, False), (True, False), (False, True)]
    monkeypatch.setenv("DISAGGKD_VERBOSITY", "quiet")
    run_with([], lambda: seen.append((verbosity.is_quiet(), verbosity.is_verbose())))
    assert seen[-1] == (True, False), "a process that was started says as much as the one that started it"
    verbosity.say("wrote it")
    monkeypatch.setenv("DISAGGKD_VERBOSITY", "")
    verbosity.say("wrote more")
    assert capsys.readouterr().out == "wrote more\n"


def test_both_at_once_are_refused():
    assert isinstance(run_with(["-q", "-v"]).exception, UserError)


def test_ctrl_c_says_so(monkeypatch, capsys):
    def pressed():
        raise KeyboardInterrupt

    found = run_with([], pressed).exception
    assert isinstance(found, StoppedByHand) and str(found) == "only: stopped by Ctrl-C"
    monkeypatch.setattr(cli, "app", lambda: (_ for _ in ()).throw(found))
    monkeypatch.setattr(cli, "prepare_allocator", lambda: None)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "disaggkd: only: stopped by Ctrl-C\n"


def test_a_traceback_only_when_verbose(monkeypatch, capsys):
    def fails():
        raise UserError("so it is")

    monkeypatch.setattr(cli, "app", fails)
    monkeypatch.setattr(cli, "prepare_allocator", lambda: None)
    for verbose in (False, True):
        monkeypatch.setenv("DISAGGKD_VERBOSITY", "verbose" if verbose else "")
        with pytest.raises(SystemExit):
            cli.main()
        said = capsys.readouterr().err
        assert ("Traceback" in said) == verbose
        assert said.endswith("disaggkd: so it is\n")
