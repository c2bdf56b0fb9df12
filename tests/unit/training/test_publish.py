"""The model card says what the run did and no path of its machine; a hub that fails costs no result."""

import sys
import types

import yaml

from disaggkd_cli.config import Config
from disaggkd_cli.config.models import FromTeacherConfig
from disaggkd_cli.training.model_card import licence_of, model_card
from disaggkd_cli.training.publish import push_to_hub

LINES = [
    {"step": 0, "eval_perplexity": 142.5, "eval_lm_loss": 4.9593, "eval_kd": 1.125, "eval_top1_agreement": 0.377},
    {"step": 1, "loss": 1.1, "supervised_tokens": 1000},
    {"step": 2, "loss": 0.9, "supervised_tokens": 1024},
    {
        "step": 2, "eval_perplexity": 77.1, "eval_lm_loss": 4.3452, "eval_kd": 0.6354, "eval_top1_agreement": 0.513,
        "eval_teacher_lm_loss": 3.99,
    },
]  # fmt: skip


def config(**teacher) -> Config:
    made = Config()
    made.teacher.model = teacher.get("model", "Qwen/Qwen3-8B")
    made.student.model = "/secret/home/models/qwen3-1.7b"
    made.data.train = "/secret/home/chats.jsonl"
    return made


def front_matter(card: str) -> dict:
    return yaml.safe_load(card.split("---")[1])


def test_a_card_has_the_tables_the_tokens_and_no_path():
    card = model_card(config(), None, LINES, 2, "torch 2 and transformers 5")
    assert "/secret/" not in card and "chats.jsonl" in card
    assert "| 0 | 142.5 | 4.9593 | 1.1250 | 37.7% |" in card and "| 2 | 77.1 |" in card
    assert "2,024 supervised tokens" in card and "teacher's own LM loss on it is 3.9900" in card
    assert front_matter(card)["base_model"] == ["Qwen/Qwen3-8B"]
    assert "No licence of Qwen/Qwen3-8B was found" in card


def test_an_earlier_step_has_no_later_figures():
    card = model_card(config(), None, LINES, 1, "torch 2")
    assert "77.1" not in card and "1,000 supervised tokens" in card


def test_a_teachers_licence_is_found_in_its_own_card(tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Teacher\n")
    assert licence_of(str(tmp_path)) == "apache-2.0"
    card = model_card(config(model=str(tmp_path)), None, [], 0, "torch 2")
    assert front_matter(card)["license"] == "apache-2.0" and "base_model" not in front_matter(card)
    assert licence_of(str(tmp_path / "elsewhere")) is None


def test_a_student_cut_out_of_its_teacher_says_from_which_layers():
    cut = config()
    cut.student.model = None
    cut.student.from_teacher = FromTeacherConfig(layers="best_2")
    assert "layers [0, 3] of Qwen/Qwen3-8B" in model_card(cut, [0, 3], [], 0, "torch 2")
    assert "layers `best_2` of" in model_card(cut, "best_2", [], 0, "torch 2")


class Hub:
    calls: list = []

    def create_repo(self, name, private, exist_ok):
        self.calls.append(("create", name, private))

    def upload_folder(self, repo_id, folder_path, commit_message):
        if repo_id == "me/closed":
            raise ConnectionError("no route")
        self.calls.append(("upload", repo_id, folder_path))


def test_a_student_is_uploaded_only_where_asked_and_a_failure_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(HfApi=Hub))
    monkeypatch.setattr(Hub, "calls", [])
    lines: list[str] = []
    made = config()
    assert push_to_hub(made, tmp_path, lines.append) == "" and not Hub.calls
    made.export.push_to_hub = "me/mine"
    assert push_to_hub(made, tmp_path, lines.append) == ""
    assert Hub.calls == [("create", "me/mine", True), ("upload", "me/mine", str(tmp_path))]
    made.export.push_to_hub = "me/closed"
    assert "was not uploaded (ConnectionError: no route)" in push_to_hub(made, tmp_path, lines.append)
    assert "hf upload me/closed" in lines[-1]
