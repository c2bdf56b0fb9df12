"""`disaggkd check` as a user runs it: exit codes, JSON, and what is said."""

import json
import shutil

import pytest

from tests.support.runs import TINY_TEACHER, disaggkd, disaggkd_apart, write_config

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path / "run.yaml", run_dir=str(tmp_path / "run"))


def check_json(config, *arguments):
    """Run `disaggkd check --json` with a clean standard output, and return its exit code and the checks by name."""
    code, output, _ = disaggkd_apart("check", str(config), "--json", *arguments)
    return code, {check["name"]: check for check in json.loads(output)["checks"]}


def test_a_sound_config(config, tmp_path):
    code, output = disaggkd("check", str(config))
    assert code == 0, output
    assert "14 passed, 0 failed" in output
    assert output.count("supervised text in ⟦brackets⟧") == 3
    assert not (tmp_path / "run").exists(), "a check leaves nothing behind"
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_chats_are_masked_and_shown(config, tmp_path):
    template = (
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    (tmp_path / "template.jinja").write_text(template)
    with (tmp_path / "chats.jsonl").open("w") as file:
        for number in range(40):
            turns = [{"role": "user", "content": f"What is {number}?"}, {"role": "assistant", "content": "It is so."}]
            file.write(json.dumps({"messages": turns * 2}) + "\n")
    code, found = check_json(
        config, f"data.train={tmp_path / 'chats.jsonl'}", f"data.chat_template={tmp_path / 'template.jinja'}",
        "data.eval=0.2", "data.sequence_length=192", "data.packing='off'",
    )  # fmt: skip
    assert code == 0, found
    parts = found["masks"]["values"]["samples"][0]["segments"]
    assert ["".join(text for text, supervised in parts if supervised)] == [" It is so.\n It is so.\n"]
    assert 0.1 < found["masks"]["values"]["supervised_share"] < 0.5


def test_a_fault_exits_with_1_and_names_the_check(config, tmp_path):
    student = tmp_path / "student"
    shutil.copytree(TINY_TEACHER, student)
    state = json.loads((student / "tokenizer.json").read_text())
    tokens = {index: token for token, index in state["model"]["vocab"].items()}
    state["model"]["vocab"] |= {tokens[900]: 901, tokens[901]: 900}
    (student / "tokenizer.json").write_text(json.dumps(state))
    code, found = check_json(config, "student.from_teacher=null", f"student.model={student}", "--only", "vocabulary")
    assert code == 1
    assert list(found) == ["vocabulary"]
    assert f"id 900 is {tokens[900]!r} to the teacher" in found["vocabulary"]["why"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["teacher.model=/nowhere"], "teacher.model"),
        (["loss.temperature=0"], "loss.temperature"),
        (["--only", "fussed loss"], "fussed loss is no check"),
        (["data.train=/nowhere.txt"], "data.train"),
    ],
)
def test_mistakes_of_the_user_exit_with_2(config, arguments, said):
    code, output = disaggkd("check", str(config), *arguments)
    assert code == 2, output
    assert said in output
    assert "Traceback" not in output


def test_a_colocated_config_with_all_the_trimmings(config):
    code, found = check_json(
        config, "mode=colocated", "student.dtype=bfloat16", "teacher.dtype=bfloat16", "loss.divergence=jsd",
        "loss.temperature=2", "loss.ce_weight=0.5", "student.freeze=['*embed*']",
        "student.activation_checkpointing=full", "data.packing='off'",
    )  # fmt: skip
    assert code == 0, [check for check in found.values() if check["outcome"] == "fail"]
    assert found["remote states"]["outcome"] == "not applicable"


@pytest.mark.slow
def test_float8_on_the_wire_is_checked_within_its_rounding(config):
    code, found = check_json(config, "transport.dtype=float8", "--only", "remote states")
    assert code == 0
    assert 0 < found["remote states"]["values"]["difference"] < 0.05
