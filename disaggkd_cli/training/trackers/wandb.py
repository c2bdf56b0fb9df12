"""Weights & Biases, through its own client."""

from __future__ import annotations

from disaggkd_cli.training.trackers.tracker import Opening, TrackerEntry


class _WeightsAndBiases:
    def __init__(self, opening: Opening) -> None:
        import wandb

        self._run = wandb.init(
            project=opening.project,
            name=opening.root.name,
            id=opening.run_id,
            resume="allow",
            dir=str(opening.root),
        )
        self.run_id = self._run.id
        # The client's own step only grows, and would drop the steps that a resumed run does again.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, figures: dict[str, float]) -> None:
        self._run.log({**figures, "step": step})

    def close(self) -> None:
        self._run.finish()


WANDB = TrackerEntry("wandb", "wandb", _WeightsAndBiases)
