"""TensorBoard event files in the run's directory."""

from __future__ import annotations

from disaggkd_cli.training.run_directory import RunDirectory
from disaggkd_cli.training.trackers.tracker import Opening, TrackerEntry


class _TensorBoard:
    run_id = None

    def __init__(self, opening: Opening) -> None:
        from torch.utils.tensorboard import SummaryWriter

        directory = RunDirectory(opening.root).tensorboard
        self._board = SummaryWriter(str(directory), purge_step=opening.first_step + 1)

    def write(self, step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()

    def write_text(self, step: int, name: str, markdown: str) -> None:
        self._board.add_text(name, markdown, step)
        self._board.flush()

    def close(self) -> None:
        self._board.close()


TENSORBOARD = TrackerEntry("tensorboard", "tensorboard", _TensorBoard, optional=True)
