"""MLflow, through its own client; where the server is, its variable MLFLOW_TRACKING_URI says."""

from __future__ import annotations

import time

from disaggkd_cli.training.trackers.tracker import Opening, TrackerEntry


class _MLflow:
    def __init__(self, opening: Opening) -> None:
        import mlflow
        from mlflow.entities import Metric

        self._metric = Metric
        self._client = mlflow.MlflowClient()
        if opening.run_id is not None:
            self.run_id = opening.run_id
            self._client.update_run(self.run_id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(opening.project)
        experiment = found.experiment_id if found else self._client.create_experiment(opening.project)
        self.run_id = self._client.create_run(experiment, run_name=opening.root.name).info.run_id

    def write(self, step: int, figures: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(name, float(value), now, step) for name, value in figures.items()]
        self._client.log_batch(self.run_id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self.run_id)


MLFLOW = TrackerEntry("mlflow", "mlflow", _MLflow)
