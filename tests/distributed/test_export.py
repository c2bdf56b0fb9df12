"""`disaggkd export`: any checkpoint of a run as a directory to publish."""

import stat

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from disaggkd_cli.cli import app
from disaggkd_cli.errors import UserError
from disaggkd_cli.export_command import export_command
from tests.support.runs import weights_sha256


def weights(directory) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(directory, dtype="auto").state_dict()


def test_a_finished_run_exports_its_newest_checkpoint_bit_for_bit(reference, tmp_path):
    found = export_command(str(reference), None, "float32", str(tmp_path / "out"))
    assert (found / "model.safetensors").read_bytes() == (reference / "student" / "model.safetensors").read_bytes()
    assert weights_sha256(reference)  # the run's own export is still there
    card = (found / "README.md").read_text()
    assert card == (reference / "student" / "README.md").read_text()
    assert "## On held-out text" in card and str(reference) not in card
    assert not (found / "config.json").read_text().count("_name_or_path")


def test_an_earlier_step_in_another_dtype(reference, tmp_path):
    steps = sorted(int(path.name.removeprefix("step_")) for path in (reference / "checkpoints").glob("step_*"))
    found = export_command(str(reference), steps[0], "bfloat16", str(tmp_path / "out"))
    last = weights(reference / "student")
    earlier = weights(found)
    assert {tensor.dtype for tensor in earlier.values()} == {torch.bfloat16}
    assert any(not torch.equal(earlier[name], last[name].bfloat16()) for name in earlier)


def test_files_take_the_modes_of_any_new_file(reference):
    (reference / "probe").write_text("")
    expected = stat.S_IMODE((reference / "probe").stat().st_mode)
    (reference / "probe").unlink()
    assert {stat.S_IMODE(path.stat().st_mode) for path in (reference / "student").glob("*.*")} == {expected}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": 3}, "--step 3: there is no such checkpoint; there are"),
        ({"dtype": "float8"}, "--dtype float8: must be one of"),
        ({"output": "."}, "is there already"),
    ],
)
def test_wrong_words_name_the_mend(reference, arguments, message):
    with pytest.raises(UserError, match=message):
        export_command(str(reference), **{"step": None, "dtype": None, "output": None, **arguments})


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="no run's directory"):
        export_command(str(tmp_path), None, None, None)


def test_the_command(reference, tmp_path):
    found = CliRunner().invoke(app, ["export", str(reference), "-o", str(tmp_path / "out")], catch_exceptions=False)
    assert found.exit_code == 0 and "float32" in found.output
