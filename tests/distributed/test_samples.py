"""Real runs write samples: the words that transformers' own `generate` finds, wherever the teacher is."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from disaggkd_cli.training.samples import read_samples
from tests.support.runs import TINY_TEACHER, disaggkd, run_to_end, write_config

pytestmark = pytest.mark.timeout(180)
PROMPTS = ["It is a", "There was"]
OWN = f"log.sample_prompts={PROMPTS}"


def generated(directory, prompt: str) -> str:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    return tokenizer.decode(out[0, ids["input_ids"].shape[1] :])


def texts(run, writer: str, step: int) -> list[str]:
    return [one.text for one in read_samples(run / "samples.jsonl") if (one.writer, one.step) == (writer, step)]


@pytest.fixture
def config(tmp_path):
    log = {"samples": 2, "sample_tokens": 8}
    return write_config(tmp_path / "run.yaml", train__steps=2, train__eval_every=1, log=log)


def test_samples_are_what_the_models_write(config, tmp_path):
    run = run_to_end(config, tmp_path / "run", OWN)
    for step in (0, 1, 2):
        assert texts(run, "teacher", step) == [generated(TINY_TEACHER, prompt) for prompt in PROMPTS]
    assert texts(run, "student", 2) == [generated(run / "student", prompt) for prompt in PROMPTS]
    assert "fixed prompts, after step 2" in (run / "logs" / "student_0.log").read_text()


@pytest.mark.slow
def test_ranks_that_share_both_models_write_together(config, tmp_path):
    run = run_to_end(
        config, tmp_path / "run", OWN, "mode=colocated", "student.ranks=2", "train.micro_batch_sequences=2"
    )
    assert texts(run, "teacher", 2) == [generated(TINY_TEACHER, prompt) for prompt in PROMPTS]
    assert texts(run, "student", 2) == [generated(run / "student", prompt) for prompt in PROMPTS]


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_its_samples(config, tmp_path):
    whole, stopped = run_to_end(config, tmp_path / "whole", OWN), tmp_path / "stopped"
    code, output = disaggkd("run", str(config), f"run_dir={stopped}", OWN, "train.stop_at=1")
    assert code == 75, output
    run_to_end(config, stopped, OWN, "--resume", "auto")
    assert read_samples(stopped / "samples.jsonl") == read_samples(whole / "samples.jsonl")
