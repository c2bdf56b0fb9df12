"""`disaggkd env` says what a maintainer asks for, and no secret."""

from typer.testing import CliRunner

from disaggkd_cli.cli import app


def test_it_names_versions_devices_and_the_variables_of_nccl_alone(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    output = CliRunner().invoke(app, ["env"], catch_exceptions=False).output
    for word in ("disaggkd", "torch", "transformers", "cores", "gloo", "NCCL_DEBUG"):
        assert word in output
    assert "hf_secret" not in output
