"""The planner and a run decide alike whether documents share rows."""

import json

import pytest
from transformers import AutoConfig

from disaggkd_cli.config import Config
from disaggkd_cli.models import packs_documents
from disaggkd_cli.planner.inputs import workload_of
from disaggkd_cli.planner.models.find import PRESETS as DIRECTORY

PRESETS = sorted(DIRECTORY.glob("*.json"))


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_as_a_run_does(path, tmp_path):
    fields = json.loads(path.read_text())["config"]
    if fields["model_type"] == "kimi_k2":  # DeepSeek-V3's class under a name of its own
        fields["model_type"] = "deepseek_v3"
    (tmp_path / "config.json").write_text(json.dumps(fields))
    as_run = packs_documents(AutoConfig.for_model(**fields))[0]

    config = Config()
    config.teacher.model = config.student.model = str(tmp_path)
    assert workload_of(config).packed is as_run


@pytest.mark.parametrize("packing, attention, expected", [
    ("on", "auto", True), ("off", "auto", False),
    ("auto", "flash_attention_2", False), ("on", "flash_attention_2", True),
    ("auto", "flash_attention_3", False), ("auto", "flex_attention", False), ("on", "flex_attention", True),
])  # fmt: skip
def test_keys_decide_first(packing, attention, expected):
    config = Config()
    config.teacher.model = config.student.model = PRESETS[-1].stem
    config.data.packing, config.teacher.attention = packing, attention
    assert workload_of(config).packed is expected
