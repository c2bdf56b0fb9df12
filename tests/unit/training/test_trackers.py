"""Each tracker gets every figure through its client; resumed runs go on with theirs; one that fails costs no run."""

import json
import logging
import sys
from dataclasses import fields
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from disaggkd_cli.config import LogConfig
from disaggkd_cli.errors import UserError
from disaggkd_cli.training.metrics import MetricsLog, read_metrics
from disaggkd_cli.training.run_directory import RunDirectory
from disaggkd_cli.training.samples import FIXED, ON_POLICY, Sample
from disaggkd_cli.training.trackers import TRACKERS
from disaggkd_cli.training.tracking import wanted_trackers


class Client:
    """Stands in for a run of wandb and trackio, and for MLflow's client; keeps what it was told."""

    def __init__(self):
        self.told = []
        self.broken = False
        self.info = SimpleNamespace(run_id="id-1")

    def _tell(self, *what):
        if self.broken:
            raise ConnectionError("no route")
        self.told.append(what)

    def init(self, **arguments):
        self._tell("init", arguments)
        self.id = arguments.get("id") or "id-1"
        return self

    def define_metric(self, name, step_metric):
        self._tell("define", name, step_metric)

    def log(self, figures, step=None):
        step = figures.get("step") if step is None else step
        self._tell("figures", step, {name: value for name, value in figures.items() if name != "step"})

    def finish(self):
        self._tell("end")

    def get_experiment_by_name(self, name):
        return None

    def create_experiment(self, name):
        self._tell("experiment", name)
        return "7"

    def create_run(self, experiment, run_name):
        self._tell("run", experiment, run_name)
        return self

    def update_run(self, run_id, status):
        self._tell("again", run_id, status)

    def log_batch(self, run_id, metrics):
        assert run_id == "id-1" and len({metric.step for metric in metrics}) == 1
        self._tell("figures", metrics[0].step, {metric.name: metric.value for metric in metrics})

    def set_terminated(self, run_id):
        self._tell("end")


@pytest.fixture
def client(monkeypatch):
    client = Client()

    def put(name, **content):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)

    put("wandb", init=client.init)
    put("trackio", init=client.init)
    put("mlflow", MlflowClient=lambda: client)
    put(
        "mlflow.entities",
        Metric=lambda name, value, timestamp, step: SimpleNamespace(name=name, value=value, step=step),
    )
    return client


def settings(**asked) -> LogConfig:
    return LogConfig(**{"tensorboard": False, **asked})


def run(root, first_step, asked, figures):
    log = MetricsLog(RunDirectory(root), first_step, asked)
    for step, line in figures:
        log.write(step, line)
    log.close()


def test_every_key_is_a_tracker_and_every_tracker_a_key():
    others = {"samples", "sample_prompts", "sample_tokens", "timeline"}
    assert {field.name for field in fields(LogConfig)} - others == set(TRACKERS)


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_tracker_gets_every_number_and_a_resumed_run_goes_on(name, client, tmp_path):
    root = tmp_path / "attempt"
    root.mkdir()
    asked = settings(**{name: "distilling"})
    run(root, 0, asked, [(1, {"loss": 2.5, "note": "text"}), (2, {"loss": 2.0, "eval_kd": 0.5})])
    assert [told for told in client.told if told[0] in ("figures", "end")] == [
        ("figures", 1, {"loss": 2.5}), ("figures", 2, {"loss": 2.0, "eval_kd": 0.5}), ("end",),
    ]  # fmt: skip
    assert "distilling" in str(client.told) and "attempt" in str(client.told)
    (kept,) = json.loads(RunDirectory(root).trackers.read_text()).values()
    client.told.clear()
    run(root, 1, asked, [(2, {"loss": 1.5})])
    assert kept in str(client.told[0]), "the same run is opened again"
    assert ("figures", 2, {"loss": 1.5}) in client.told
    client.told.clear()
    run(root, 0, asked, [])
    if name != "mlflow":
        assert (
            client.told[0][1].get("id") is None
            and client.told[0][1]["name"] in ("attempt",)
            or (name == "trackio" and client.told[0][1]["name"] != kept)
        ), "a run from the first step is a new one"
    else:
        assert "again" not in [told[0] for told in client.told]


@pytest.mark.parametrize("at", ["open", "write", "close"])
@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_tracker_that_fails_is_named_once_and_costs_no_run(name, at, client, tmp_path, caplog):
    caplog.set_level(logging.WARNING, "disaggkd")
    client.broken = at == "open"
    log = MetricsLog(RunDirectory(tmp_path), 0, settings(**{name: "distilling"}))
    log.write(1, {"loss": 2.0})
    client.broken = client.broken or at == "write"
    log.write(2, {"loss": 1.0})
    log.write(3, {"loss": 0.5})
    client.broken = True
    log.close()
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert [record.message for record in caplog.records] == [
        f"log.{name}: no more figures go there (ConnectionError: no route); metrics.jsonl has them all"
    ]


def test_a_client_that_is_missing_is_named_with_the_mend(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert wanted_trackers(LogConfig()) == {}, "TensorBoard is a default, and passed over where it is missing"
    for name in ("wandb", "mlflow", "trackio"):
        with pytest.raises(UserError, match=rf"log.{name}: the package {name} is not installed; .*log.{name}=null"):
            wanted_trackers(settings(**{name: "distilling"}))


def test_tensorboard_writes_scalars(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run(tmp_path, 0, LogConfig(), [(1, {"loss": 2.0, "note": "text"}), (2, {"loss": 1.0})])
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.0), (2, 1.0)]
    assert not (tmp_path / "trackers.json").exists()
    run(tmp_path / "none", 0, settings(), []) if (tmp_path / "none").mkdir() else None
    assert not (tmp_path / "none" / "tensorboard").exists()


def test_tensorboard_shows_samples_and_the_others_are_not_asked(client, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = MetricsLog(RunDirectory(tmp_path), 0, LogConfig(wandb="distilling"))
    log.write_samples(
        4, [Sample(4, FIXED, "Once | upon", "teacher", "a time\nthere was"), Sample(4, ON_POLICY, "a", "b", "c")]
    )
    log.write(5, {"loss": 1.0})
    log.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert len(events.Tags()["tensors"]) == 2
    (event,) = events.Tensors(f"{FIXED}/text_summary")
    assert event.step == 4
    assert "| Once \\| upon | teacher | a time ⏎ there was |" in event.tensor_proto.string_val[0].decode()
    assert ("figures", 5, {"loss": 1.0}) in client.told, "a tracker that takes no texts goes on"
