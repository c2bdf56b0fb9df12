"""The configuration of a run: what there is to set, reading it, checking it."""

from disaggkd_cli.config.check import check
from disaggkd_cli.config.load import load, to_yaml
from disaggkd_cli.config.schema import (
    CHOICES,
    DIVERGENCES,
    Config,
    DataConfig,
    FromTeacherConfig,
    HardwareConfig,
    LaunchConfig,
    LogConfig,
    LossConfig,
    StudentConfig,
    TeacherConfig,
    TrainConfig,
    TransportConfig,
)

__all__ = [
    "CHOICES",
    "DIVERGENCES",
    "Config",
    "DataConfig",
    "FromTeacherConfig",
    "HardwareConfig",
    "LaunchConfig",
    "LogConfig",
    "LossConfig",
    "StudentConfig",
    "TeacherConfig",
    "TrainConfig",
    "TransportConfig",
    "check",
    "load",
    "to_yaml",
]
