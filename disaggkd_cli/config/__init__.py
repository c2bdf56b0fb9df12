"""The configuration of a run: what there is to set, reading it, checking it."""

from disaggkd_cli.config.check import check
from disaggkd_cli.config.load import load, to_yaml
from disaggkd_cli.config.models import FromTeacherConfig, LoraConfig, StudentConfig, TeacherConfig
from disaggkd_cli.config.schema import (
    CHOICES,
    DIVERGENCES,
    Config,
    HardwareConfig,
    LaunchConfig,
    LogConfig,
    LossConfig,
    TrainConfig,
    TransportConfig,
)
from disaggkd_cli.config.texts import DataConfig

__all__ = [
    "CHOICES",
    "DIVERGENCES",
    "Config",
    "DataConfig",
    "FromTeacherConfig",
    "HardwareConfig",
    "LaunchConfig",
    "LogConfig",
    "LoraConfig",
    "LossConfig",
    "StudentConfig",
    "TeacherConfig",
    "TrainConfig",
    "TransportConfig",
    "check",
    "load",
    "to_yaml",
]
