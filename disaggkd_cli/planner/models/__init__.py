"""Shapes of models: where they are found, what they consist of, how many parameters that is."""

from disaggkd_cli.planner.models.find import hub_config, load_preset, local_fields, preset_names, resolve_model

__all__ = ["hub_config", "load_preset", "local_fields", "preset_names", "resolve_model"]
