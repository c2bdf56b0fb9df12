"""How results are shown: masks with colour and without, the table, JSON, and the exit code's reason."""

import io
import json
import subprocess
import sys

import numpy as np
import pytest

from disaggkd_cli import terminal
from disaggkd_cli.checks.report import print_line, print_results, print_samples, summary, to_json
from disaggkd_cli.checks.result import FAIL, NOT_APPLICABLE, PASS, CheckResult
from disaggkd_cli.checks.sample import SAMPLE_TOKENS, dataset_of, sample_sequences, shortened
from disaggkd_cli.checks.texts import segments
from disaggkd_cli.data import IGNORE, Sequence, load_tokenizer
from tests.support.runs import TINY_TEACHER

RESULTS = [
    CheckResult(PASS, "0.0", "compared [this] with that", {"difference": 0.0}, "student head", 0.5),
    CheckResult(FAIL, "3.0", "so wrong", {}, "gradients", 1.0),
    CheckResult(NOT_APPLICABLE, "", "nothing travels", {}, "remote states"),
]


def console(colour):
    return terminal.console(
        file=io.StringIO(), width=120, force_terminal=colour, color_system="standard" if colour else None
    )


def printed(samples, colour):
    out = console(colour)
    print_samples(samples, out)
    return out.file.getvalue()


SAMPLES = [{"sequence": 4, "segments": [("What is [it]? ", False), ("A cat.", True)]}]


def test_supervised_text_stands_in_brackets_without_colour():
    assert "What is [it]? ⟦A cat.⟧" in printed(SAMPLES, False)


def test_supervised_text_is_green_with_colour():
    text = printed(SAMPLES, True)
    assert "\x1b[30;42mA cat.\x1b[0m" in text
    assert "⟦A" not in text


def test_without_colour_on_a_terminal_too(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert "⟦A cat.⟧" in printed(SAMPLES, True)


def test_json_has_no_numbers_that_json_lacks():
    text = to_json([CheckResult(FAIL, "", "", {"difference": float("nan"), "pair": [float("inf"), 1.0]}, "fused loss")])
    values = json.loads(text, parse_constant=lambda name: pytest.fail(name))["checks"][0]["values"]
    assert values == {"difference": "nan", "pair": ["inf", 1.0]}


def test_the_table_names_every_check_and_the_last_line_the_failures():
    out = console(False)
    print_results(RESULTS, out)
    text = out.file.getvalue()
    assert all(part in text for part in ("student head", "compared [this] with that", "so wrong", "not applicable"))
    assert text.rstrip().endswith("1 passed, 1 failed, 1 not applicable in 1.5 s; failed: gradients")


def test_json_holds_everything():
    record = json.loads(to_json(RESULTS))
    assert record["passed"] is False
    assert [check["name"] for check in record["checks"]] == ["student head", "gradients", "remote states"]
    assert record["checks"][0]["values"] == {"difference": 0.0}
    assert json.loads(to_json(RESULTS[:1]))["passed"] is True


def test_the_summary_of_a_sound_config_names_no_failure():
    assert summary(RESULTS[:1]) == "1 passed, 0 failed in 0.5 s"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY_TEACHER)


def sequence_of(tokenizer, *parts):
    """A sequence of `(text, supervised)` parts, tokenised apart."""
    ids, supervised = [], []
    for text, counts in parts:
        piece = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += piece
        supervised += [counts] * len(piece)
    ids, supervised = np.asarray(ids, np.int32), np.asarray(supervised)
    labels = np.full(len(ids), IGNORE, np.int32)
    labels[:-1] = np.where(supervised[1:], ids[1:], IGNORE)
    return Sequence(ids, labels, (len(ids),))


def test_segments_are_the_supervised_tokens_themselves(tokenizer):
    sequence = sequence_of(tokenizer, ("The question is", False), (" this answer.", True), (" Then", False))
    assert segments(tokenizer, sequence) == [
        ("The question is", False), (" this answer.", True), (" Then", False)
    ]  # fmt: skip


def test_an_answer_of_one_token_is_seen(tokenizer):
    token = tokenizer.decode(tokenizer(" she", add_special_tokens=False)["input_ids"][:1])
    sequence = sequence_of(tokenizer, ("The question is", False), (token, True))
    assert segments(tokenizer, sequence)[-1] == (token, True)


def test_a_letter_cut_by_a_mask_is_shown_whole_on_one_side(tokenizer):
    ids = np.asarray(tokenizer("é", add_special_tokens=False)["input_ids"], np.int32)
    sequence = Sequence(ids, np.append(ids[1:], IGNORE), (len(ids),))
    assert "".join(text for text, _ in segments(tokenizer, sequence)) == "é"


def test_a_long_prompt_is_left_out_but_for_its_end(tokenizer):
    sequence = sequence_of(tokenizer, ("On and on it goes. " * 60, False), ("Stop", True))
    shown = segments(tokenizer, sequence)
    assert shown[0] == ("… ", False)
    assert shown[-1] == ("Stop", True)
    assert len(shown[1][0]) < 600


def test_short_sequences_keep_their_prompt_and_a_label():
    ids = np.arange(400, dtype=np.int32)
    labels = np.full(400, IGNORE, np.int32)
    labels[299:] = np.append(ids[300:], IGNORE)
    short = shortened(Sequence(ids, labels, (250, 150)), 80)
    assert len(short) == 340
    assert short.document_lengths == (250, 90)
    assert (short.labels != IGNORE).any()
    whole = shortened(Sequence(ids[:30], ids[:30], (30,)), 80)
    assert len(whole) == 30


def test_the_sample_has_four_lengths_even_of_one_sequence():
    ids = np.arange(200, dtype=np.int32)
    dataset = dataset_of([Sequence(ids, ids + 1, (200,))])
    assert [len(sequence) for sequence in sample_sequences(dataset, seed=1)] == list(SAMPLE_TOKENS)


def test_the_command_is_imported_without_torch():
    code = "import sys, disaggkd_cli.checks.command; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_line_comes_as_each_check_ends():
    out = console(False)
    for result in RESULTS:
        print_line(result, out)
    assert out.file.getvalue().splitlines() == [
        "pass  student head (0.5 s): 0.0",
        "fail  gradients (1.0 s): so wrong",
        "not applicable remote states (0.0 s): nothing travels",
    ]


def test_the_slow_checks_are_named_where_one_chooses():
    from disaggkd_cli import cli
    from disaggkd_cli.checks.run import CHECKS, SLOW

    assert set(SLOW) < set(CHECKS)
    assert all(f"`{name}`" in cli._ONLY for name in SLOW)
