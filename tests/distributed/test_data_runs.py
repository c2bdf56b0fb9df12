"""Runs on mixed, unpacked and streamed texts resume exactly, and do not depend on how many ranks share the work."""

import json
import random

import pytest

from tests.support.runs import disaggkd, losses, run_to_end, status, weights_sha256, write_config

WORDS = "the a of and in to she her was had not be it that with as for but which".split()


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Two sources of prompts with completions of many lengths, and a third to hold out."""
    directory = tmp_path_factory.mktemp("texts")
    draw = random.Random(7)
    for name, count, longest in (("a", 90, 12), ("b", 17, 30), ("held_out", 12, 20)):
        with (directory / f"{name}.jsonl").open("w") as file:
            for _ in range(count):
                words = [" ".join(draw.choices(WORDS, k=draw.randint(1, longest))) for _ in range(2)]
                file.write(json.dumps({"prompt": words[0], "completion": f" {words[1]}"}) + "\n")
    return directory


def config_of(texts, path, **changes):
    sources = [{"path": str(texts / "a.jsonl"), "weight": 3}, {"path": str(texts / "b.jsonl"), "weight": 1}]
    return write_config(
        path, mode="colocated", data__train=sources, data__eval=str(texts / "held_out.jsonl"), data__packing="off",
        data__sequence_length=96, train__steps=12, train__eval_every=0, train__save_every=0, **changes,
    )  # fmt: skip


def interrupted(config, run_dir, stops=(4, 8)):
    for number, stop in enumerate(stops):
        resume = "auto" if number else "never"
        code, output = disaggkd("run", str(config), f"run_dir={run_dir}", f"train.stop_at={stop}", "--resume", resume)
        assert code == 75 and status(run_dir)["last_step"] == stop, output
    return run_to_end(config, run_dir, "--resume", "auto")


def test_two_resumes_within_an_epoch_of_mixed_texts_in_batches_by_length(texts, tmp_path):
    # 36 draws of 90 sequences and 12 of 17: both sources are within their first epoch, and one bucketing window.
    config = config_of(texts, tmp_path / "config.yaml", data__cache=str(tmp_path / "cache"))
    whole = run_to_end(config, tmp_path / "whole")
    assert len(losses(whole)) == 12
    pieces = interrupted(config, tmp_path / "pieces")
    assert losses(pieces) == losses(whole)
    assert weights_sha256(pieces) == weights_sha256(whole)
    log = "".join(path.read_text() for path in (whole / "logs").rglob("*") if path.is_file())
    assert "data.train[1]: weight 3 of 4" in log and "batches hold sequences of similar lengths" in log


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["off", "on"])
def test_two_resumes_within_an_epoch_of_streamed_texts(texts, tmp_path, packing):
    config = config_of(
        texts, tmp_path / "config.yaml", data__streaming=True, data__shuffle_tokens=500, data__length_bucketing=False
    )
    whole = run_to_end(config, tmp_path / "whole", f"data.packing={packing}")
    config.write_text(config.read_text().replace("packing: 'off'", f"packing: '{packing}'"))
    pieces = interrupted(config, tmp_path / "pieces")
    assert losses(pieces) == losses(whole)
    assert weights_sha256(pieces) == weights_sha256(whole)
    (pieces / "stream_0.jsonl").unlink()  # slower without it, and no less exact
    forgetful = interrupted(config, tmp_path / "forgetful", stops=(6,))
    assert weights_sha256(forgetful) == weights_sha256(whole)


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_the_order_does_not_depend_on_ranks_and_micro_batches(texts, tmp_path, streaming):
    config = config_of(texts, tmp_path / "config.yaml", data__streaming=streaming, data__shuffle_tokens=500)
    one = losses(run_to_end(config, tmp_path / "one"))
    for name, arguments in {
        "two ranks": ("student.ranks=2", "train.micro_batch_sequences=2"),
        "accumulated": ("train.micro_batch_sequences=1", "train.accumulation=4"),
    }.items():
        found = losses(run_to_end(config, tmp_path / name.replace(" ", "_"), *arguments))
        assert found == pytest.approx(one, rel=1e-5), name
