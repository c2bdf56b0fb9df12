"""What a resumed run says about keys that changed: every key of the schema has its meaning, and the page names it."""

from pathlib import Path

import pytest

from disaggkd_cli.config import Config
from disaggkd_cli.config.load import known_keys
from disaggkd_cli.config.models import FromTeacherConfig, LoraConfig
from disaggkd_cli.training.checkpoint import Checkpoint
from disaggkd_cli.training.resume import changed_settings
from disaggkd_cli.training.settings import (
    BITS,
    BY_CONTENT,
    COURSE,
    MEANINGS,
    NOTHING,
    SETTINGS,
    changes,
    meaning_of,
    settings_of,
)  # fmt: skip

PAGE = (Path(__file__).parents[3] / "docs" / "launch.md").read_text()
BY_MEANING = {
    BY_CONTENT: ("seed", "data.train", "data.sequence_length", "teacher.model", "student.from_teacher.layers"),
    COURSE: ("train.learning_rate", "train.steps", "loss.temperature", "loss.divergence", "student.lora.alpha"),
    BITS: (
        "teacher.dtype", "teacher.parallelism", "student.dtype", "student.ranks", "transport.dtype", "launch.threads",
        "loss.implementation", "loss.memory_budget", "train.micro_batch_sequences", "mode",
    ),
    NOTHING: ("run_dir", "teacher.replicas", "data.workers", "train.save_every", "transport.timeout", "export.dtype",
              "log.wandb", "hardware.gpu"),
}  # fmt: skip


def test_every_key_has_a_meaning_and_no_meaning_is_of_no_key():
    keys = known_keys()
    assert {meaning_of(key) for key in keys} == {BY_CONTENT, COURSE, BITS, NOTHING}
    assert set(MEANINGS) <= set(keys)


@pytest.mark.parametrize("meaning", BY_MEANING)
def test_what_a_change_means(meaning):
    for key in BY_MEANING[meaning]:
        assert meaning_of(key) == meaning, key
        said = changes({key: 1}, {key: 2})
        if meaning in (COURSE, BITS):
            assert said == [f"{key} was 1 and is 2 now: {meaning}"]
        else:
            assert said == []


def test_settings_are_plain_and_whole():
    config = Config()
    config.student.from_teacher, config.student.lora = FromTeacherConfig("best_20"), LoraConfig()
    config.data.columns = {"prompt": "question"}
    found = settings_of(config)
    assert found["student.from_teacher.layers"] == "best_20" and found["data.columns"] == {"prompt": "question"}
    assert found["train.adam_betas"] == list(config.train.adam_betas)
    assert "run_dir" not in found and "teacher.replicas" not in found
    assert changes(found, found) == []


def test_keys_of_another_version_are_not_compared():
    assert changes({"loss.gone": 1, "loss.beta": 0.5}, {"loss.beta": 0.5, "loss.temperature": 1.0}) == []


def test_what_differs_from_a_checkpoint(tmp_path):
    before, now = Config(), Config()
    now.train.learning_rate, now.transport.dtype, now.transport.timeout = 9.0, "float8", 7.0
    checkpoint = Checkpoint(tmp_path, 3, {SETTINGS: settings_of(before)}, ())
    rate, wire = changed_settings(checkpoint, {SETTINGS: settings_of(now)})
    assert rate.startswith("train.learning_rate was ") and rate.endswith(f" is 9.0 now: {COURSE}")
    assert wire == f"transport.dtype was 'bfloat16' and is 'float8' now: {BITS}"
    assert changed_settings(Checkpoint(tmp_path, 3, {}, ()), {SETTINGS: settings_of(now)}) == []


@pytest.mark.parametrize("meaning", [COURSE, BITS])
def test_the_page_says_it(meaning):
    assert meaning.split(":")[0].removeprefix("training ") in PAGE
