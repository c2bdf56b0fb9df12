"""What `log.timeline` records, and what it costs where it is off: nothing."""

from types import SimpleNamespace

from disaggkd_cli.config import load
from disaggkd_cli.training.run_directory import RunDirectory
from disaggkd_cli.training.timeline import ASK, FORWARD, WAIT, Timeline, open_timeline, read_timeline
from tests.support.runs import write_config


def opened(tmp_path, **log):
    (tmp_path / "logs").mkdir(exist_ok=True)
    config = load(write_config(tmp_path / "run.yaml", log=log))
    return open_timeline(config, RunDirectory(tmp_path), "teacher 0")


def test_nothing_is_recorded_unless_asked_for(tmp_path):
    def forward(request):
        return request

    timeline = opened(tmp_path)
    timeline.asked(1)
    assert timeline.timed(forward) is forward
    assert read_timeline(tmp_path / "logs") == {}
    config = load(write_config(tmp_path / "run.yaml", log={"timeline": True}))
    assert open_timeline(config, None, "teacher 0").timed(forward) is forward, "a job of its own has no directory"


def test_work_is_recorded_with_its_times_and_its_request(tmp_path):
    timeline = opened(tmp_path, timeline=True)
    timeline.asked(7)
    assert timeline.timed(lambda request: request.request_id)(SimpleNamespace(request_id=7)) == 7
    timeline.add(WAIT, 5.0, 8)
    (rank, spans) = next(iter(read_timeline(tmp_path / "logs").items()))
    assert rank == "teacher_0"
    assert [(span.what, span.request) for span in spans] == [(ASK, 7), (FORWARD, 7), (WAIT, 8)]
    assert all(span.start <= span.end for span in spans) and spans[2].start == 5.0


def test_a_forward_that_fails_is_recorded_and_fails(tmp_path):
    def broken(request):
        raise ValueError("no")

    try:
        opened(tmp_path, timeline=True).timed(broken)(SimpleNamespace(request_id=1))
    except ValueError:
        pass
    else:
        raise AssertionError("the error is lost")
    assert [span.what for span in read_timeline(tmp_path / "logs")["teacher_0"]] == [FORWARD]


def test_a_line_cut_off_is_left_out(tmp_path):
    opened(tmp_path, timeline=True).asked(1)
    with (tmp_path / "logs" / "teacher_0.timeline.jsonl").open("a") as file:
        file.write('{"what": "ask", "st')
    assert len(read_timeline(tmp_path / "logs")["teacher_0"]) == 1


def test_without_a_file_nothing_happens():
    Timeline().add(WAIT, 0.0)
