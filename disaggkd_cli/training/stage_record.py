"""What each stage of a pipeline teacher recorded of its work. Written by `replica.run_stages`; read without torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from disaggkd_cli import files
from disaggkd_cli.config import Config
from disaggkd_cli.layouts import AUTO, PIPELINE
from disaggkd_cli.training.run_directory import RunDirectory


@dataclass(frozen=True)
class StageRecord:
    """One stage's work so far. Every stage writes its own beside its log.

    Attributes:
        rank: its name, such as `teacher 0.1`.
        first_layer, last_layer: the layers that it holds.
        requests: that it has computed.
        idle_share: of its time without a request to compute, over the last 10 to 20 seconds.
        most_inside: requests that its replica lets in at a time.
    """

    rank: str
    first_layer: int
    last_layer: int
    requests: int
    idle_share: float
    most_inside: int


def write_stage_record(logs: Path, record: StageRecord) -> None:
    """Replace the record of this stage.

    Raises:
        OSError: it cannot be written.
    """
    path = logs / f"{record.rank.replace(' ', '_')}.stage.json"
    files.write_text(path, json.dumps(asdict(record)))


def read_stage_records(logs: Path) -> list[StageRecord]:
    """Return the records that the stages of a run left, by rank; damaged ones are left out."""
    found = []
    for path in sorted(logs.glob("*.stage.json")) if logs.is_dir() else []:
        try:
            found.append(StageRecord(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):
            continue
    return found


def stage_idle_shares(config: Config) -> dict[str, float]:
    """Return by rank how idle the stages of this run's teachers say they are, as far as they write where it does."""
    if config.teacher.ranks_per_replica == 1 or config.teacher.parallelism not in (AUTO, PIPELINE):
        return {}
    logs = RunDirectory(Path(config.run_dir).expanduser()).logs
    return {record.rank: record.idle_share for record in read_stage_records(logs)}
