"""The table of samples: kept line by line, and gone on with."""

from disaggkd_cli.training.samples import FIXED, ON_POLICY, Sample, SamplesTable, as_markdown, read_samples


def samples(step, *texts, table=FIXED):
    return [Sample(step, table, "It was", "student", text) for text in texts]


def test_what_is_written_is_kept_logged_and_tracked(tmp_path):
    path, said, tracked = tmp_path / "samples.jsonl", [], []
    table = SamplesTable(path, 0, said.append, lambda step, some: tracked.append((step, list(some))))
    first, second = samples(0, "a dark\u2028night", 'and "stormy"\n'), samples(8, "bright", table=ON_POLICY)
    for some in (first, [], second):
        table.write(some)
    assert read_samples(path) == [*first, *second]
    assert said[0] == "fixed prompts, after step 0: 'It was' → student: 'a dark\\u2028night'"
    assert tracked == [(0, first), (8, second)]
    assert len(path.read_text().splitlines()) == 3


def test_a_resumed_run_drops_what_it_does_again_and_a_new_one_everything(tmp_path):
    path = tmp_path / "samples.jsonl"
    for step in (0, 8, 16):
        SamplesTable(path, step).write(samples(step, "x"))
    with path.open("a") as file:
        file.write('{"step": 24, "ta')
    SamplesTable(path, 8)
    assert [sample.step for sample in read_samples(path)] == [0, 8]
    SamplesTable(path, 0)
    assert read_samples(path) == []


def test_a_long_prompt_is_logged_from_its_end(tmp_path):
    line = Sample(3, FIXED, "beginning " + "x" * 80 + " end", "teacher", "text").line()
    assert "beginning" not in line and " end' → teacher: 'text'" in line


def test_texts_do_not_break_a_table():
    shown = as_markdown([Sample(1, FIXED, "a|b", "student", "one\ntwo <b>")])
    assert shown.splitlines()[2] == r"| a\|b | student | one ⏎ two &lt;b> |"


def test_a_long_text_is_logged_up_to_a_limit_that_is_told():
    line = Sample(3, FIXED, "It was", "student", "x" * 403).line()
    assert line.endswith(f"student: '{'x' * 400}' … and 3 characters more")
