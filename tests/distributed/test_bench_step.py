"""`disaggkd bench step` on real runs: the same losses, figures of each role, real limits, honest verdicts."""

import json
import time

import pytest

from disaggkd_cli.bench.runs import MODES, mode_overrides, out_of_memory, watch_run
from disaggkd_cli.bench.step import StepBenchOptions, bench_step
from disaggkd_cli.bench.step_report import claims, format_step_report, reasons
from disaggkd_cli.config import load
from disaggkd_cli.errors import RunError, UserError
from tests.support.runs import descendants, disaggkd, process_ids, start, write_config


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    config = write_config(folder / "config.yaml")
    page = folder / "page.html"
    code, output = disaggkd(
        "bench", "step", str(config), "--steps", "4", "--repeats", "1", "--no-memory", "--json", "--html", str(page),
        "--results", str(folder / "runs"),
    )  # fmt: skip
    assert code == 0, output
    return json.loads(output[output.index("{\n") :]), page.read_text(), folder / "runs"


@pytest.mark.timeout(180)
def test_all_modes_have_the_same_losses_and_their_own_figures(measured):
    result, _, _ = measured
    assert list(result["modes"]) == list(MODES)
    first = result["modes"]["colocated_full"]["losses"]
    assert len(first) == 4
    for one in result["modes"].values():
        assert one["losses"] == pytest.approx(first, abs=1e-5)
        assert one["tokens_per_second"] > 0 and 0 <= one["stall_share"] < 1
        assert sum(one["ranks"].values()) == result["ranks"] == 2
    assert set(result["modes"]["colocated_fused"]["peak_bytes"]) == {"colocated"}
    apart = result["modes"]["disaggregated_fused"]
    for name in ("peak_bytes", "training_bytes", "start_bytes"):
        assert set(apart[name]) == {"student", "teacher"}, name
    assert all(0 < apart["training_bytes"][role] < apart["peak_bytes"][role] for role in ("student", "teacher"))
    # 192 rows of 128 float32 elements are due a step; a step may already hold what was read ahead.
    assert apart["received_bytes_per_step"] >= 0 and apart["idle_share"] is not None
    assert result["modes"]["colocated_full"]["received_bytes_per_step"] == 0
    same = [one["holds"] for one in result["claims"] if one["claim"].startswith("same loss")]
    assert same == [True, True]
    assert "colocated_full" in format_step_report(result)
    assert len(reasons(result["modes"])) == 3


@pytest.mark.timeout(180)
def test_the_page_overlays_the_runs_and_the_runs_are_kept(measured):
    _, page, runs = measured
    assert "Measured" in page and all(f"{mode}_1" in page for mode in MODES)
    assert sorted(path.name for path in runs.iterdir() if path.is_dir()) == sorted(f"{mode}_1" for mode in MODES)
    assert not (runs / "colocated_full_1" / "student").exists()


@pytest.mark.timeout(180)
def test_a_bench_that_was_cut_off_goes_on_with_the_runs_it_has(measured, tmp_path):
    """All runs were kept: a second call reads them, starts nothing, and comes to the same figures."""
    result, _, runs = measured
    lines = (runs / "results.jsonl").read_text().splitlines()
    assert [json.loads(line).get("mode") for line in lines] == [None, *MODES, None]
    (runs / "results.jsonl").write_text("\n".join(lines[:-1]) + "\n")  # as if it had not come to its end
    said = []
    options = StepBenchOptions(result["config"], steps=4, repeats=1, memory=False, results=str(runs))
    again = bench_step(options, said.append)
    assert said == [f"going on after 3 measurements in {runs / 'results.jsonl'} (--fresh starts anew)"]
    assert again["modes"] == result["modes"] and again["claims"] == result["claims"]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_memory_has_runs_of_its_own(tmp_path):
    config = write_config(tmp_path / "config.yaml", run_dir=str(tmp_path / "run"))
    options = StepBenchOptions(str(config), steps=4, repeats=1, modes=("disaggregated_fused",))
    said = []
    (one,) = bench_step(options, said.append)["modes"].values()
    assert said[0].startswith("memory: disaggregated_fused student ")
    assert len(one["losses"]) == 4 and len(one["rounds"]) == 1
    assert all(1 << 20 < one["training_bytes"][role] < one["peak_bytes"][role] for role in ("student", "teacher"))


def test_every_mode_has_the_same_ranks_and_global_batch(tmp_path):
    path = write_config(tmp_path / "config.yaml", teacher__replicas=2, student__ranks=2, train__accumulation=3)
    config = load(path)
    for mode in MODES:
        changed = load(path, mode_overrides(config, mode))
        assert changed.student.ranks + changed.teacher_ranks == 4
        assert changed.global_batch_sequences == config.global_batch_sequences == 24
        assert changed.train.accumulation == 3


def test_a_batch_that_cannot_be_shared_out_is_refused(tmp_path):
    config = load(write_config(tmp_path / "config.yaml", teacher__replicas=2))
    with pytest.raises(UserError, match=r"train\.micro_batch_sequences.*multiple of 3"):
        mode_overrides(config, "colocated_fused")


def figures(rounds, peak=1 << 30, losses=(1.0, 0.5)):
    return {
        "tokens_per_second": sorted(rounds)[len(rounds) // 2],
        "tokens_per_second_spread": [min(rounds), max(rounds)],
        "rounds": rounds,
        "peak_bytes": {"any": 2 * peak},
        "training_bytes": {"any": peak},
        "losses": list(losses),
    }


@pytest.mark.parametrize(
    ("fast", "slow", "holds"),
    [([9, 10, 11], [5, 6, 8.9], True), ([5, 6, 7], [8, 9, 10], False), ([5, 6, 9], [8, 9, 10], None), ([9], [1], None)],
)
def test_a_speed_up_holds_only_when_rounds_do_not_overlap(fast, slow, holds):
    found = claims({"colocated_full": figures(slow), "colocated_fused": figures(fast)})
    assert [one["holds"] for one in found if one["claim"].startswith("faster")] == [holds]


@pytest.mark.parametrize(("lean", "holds"), [(90, True), (99, None), (110, False)])
def test_peaks_that_are_alike_decide_nothing(lean, holds):
    modes = {"colocated_full": figures([1, 2], 100 << 20), "colocated_fused": figures([1, 2], lean << 20)}
    assert [one["holds"] for one in claims(modes) if one["claim"].startswith("less memory")] == [holds]


def test_losses_that_differ_are_said():
    found = claims({"colocated_full": figures([1, 2]), "colocated_fused": figures([1, 2], losses=(1.0, 0.5001))})
    assert found[0]["holds"] is False and found[0]["figures"] == "0.0001 apart"


@pytest.mark.timeout(60)
def test_a_real_memory_limit_ends_a_run_and_the_rank_is_named(tmp_path):
    config = write_config(tmp_path / "config.yaml")
    run_dir = tmp_path / "run"
    arguments = [str(config), f"run_dir={run_dir}", "train.steps=2", "transport.teacher_wait=10", "--restarts", "0"]
    watched = watch_run(arguments, timeout=50, data_limits={"student": 200 << 20})
    assert watched.code != 0
    assert out_of_memory(run_dir / "logs", watched.output) is not None


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_run_that_takes_too_long_is_ended(tmp_path):
    config = write_config(tmp_path / "config.yaml", train__steps=100000)
    with pytest.raises(RunError, match="did not end within 6 s"):
        watch_run([str(config), f"run_dir={tmp_path / 'run'}"], timeout=6)


@pytest.mark.timeout(120)
def test_a_killed_bench_leaves_no_run_behind(tmp_path):
    config = write_config(tmp_path / "config.yaml", run_dir=str(tmp_path / "run"))
    bench = start(["bench", "step", str(config), "--steps", "100000", "--repeats", "1"])
    deadline = time.monotonic() + 60
    while not process_ids("student", str(config)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert process_ids("student", str(config))
    bench.kill()
    bench.communicate()
    deadline = time.monotonic() + 30
    while descendants(str(config)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not descendants(str(config))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_writing_is_measured_with_and_without_a_lag(tmp_path):
    config = write_config(tmp_path / "config.yaml", run_dir=str(tmp_path / "run"))
    code, output = disaggkd(
        "bench", "step", str(config), "on_policy.fraction=0.5", "on_policy.max_new_tokens=8", "--on-policy",
        "--steps", "4", "--repeats", "1", "--no-memory", "--json", "--results", str(tmp_path / "runs"),
    )  # fmt: skip
    assert code == 0, output
    modes = json.loads(output[output.index("{\n") :])["modes"]
    assert list(modes) == ["on_policy_lag_0", "on_policy_lag_1"]
    for one in modes.values():
        assert sum(one["writing"]["shares"].values()) == pytest.approx(1)
        assert all(0 <= share <= 1 for share in one["writing"]["shares"].values())
        assert 0 < one["writing"]["written_tokens_per_second"] < one["writing"]["tokens_per_second_while_writing"]
