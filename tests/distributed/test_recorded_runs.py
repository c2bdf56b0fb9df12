"""A run on recorded hidden states is the live run, to the last bit."""

import pytest

from tests.support.runs import disaggkd, losses, run_to_end, weights_sha256

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def cache(reference_config, tmp_path_factory):
    directory = tmp_path_factory.mktemp("recorded") / "cache"
    code, output = disaggkd("teacher", str(reference_config), "--record", str(directory))
    assert code == 0, output
    assert "0 of them recorded already" in output
    return directory


def test_a_recorded_run_is_the_live_run(reference_config, reference, cache, tmp_path):
    run = run_to_end(reference_config, tmp_path / "recorded", f"teacher.cache={cache}")
    assert losses(run) == losses(reference)
    assert weights_sha256(run) == weights_sha256(reference)
    assert not list((run / "logs").glob("teacher*")), "no teacher was started"


PIPELINE = ("teacher.ranks_per_replica=2", "teacher.parallelism=pipeline")


@pytest.mark.parametrize("layout", [(), PIPELINE])
def test_recording_again_computes_nothing(reference_config, cache, layout):
    """Nor for a teacher of several ranks, which is loaded whole on one: the recording is the same."""
    code, output = disaggkd("teacher", str(reference_config), "--record", str(cache), *layout)
    assert code == 0
    assert "recorded 0 requests" in output


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.sequence_length=32", "holds no hidden states of request 0"),
        ("transport.dtype=bfloat16", "dtype (float32 recorded, bfloat16 now)"),
        ("mode=colocated", "set mode=disaggregated"),
    ],
)
def test_what_was_not_recorded_is_refused(reference_config, cache, tmp_path, override, said):
    arguments = (f"run_dir={tmp_path / 'run'}", f"teacher.cache={cache}", override)
    code, output = disaggkd("run", str(reference_config), *arguments)
    assert code == 2, output
    assert said in output
