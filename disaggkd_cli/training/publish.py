"""What a finished student is published with: its model card, and the way to the hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from disaggkd_cli.config import Config
from disaggkd_cli.training.layer_choice import recorded_layers
from disaggkd_cli.training.metrics import read_metrics
from disaggkd_cli.training.model_card import model_card
from disaggkd_cli.training.run_directory import RunDirectory


def card_of(config: Config, directory: RunDirectory, step: int) -> str:
    """Return the model card of a run's student after `step`."""
    layers = recorded_layers(directory.root)
    if layers is None and config.student.from_teacher is not None:
        layers = config.student.from_teacher.layers
    versions = f"torch {torch.__version__} and transformers {transformers.__version__}"
    return model_card(config, layers, read_metrics(directory.metrics), step, versions)


def push_to_hub(config: Config, directory: Path, log: Callable[[str], None]) -> str:
    """Upload an exported student where `export.push_to_hub` says so; return what went wrong, or nothing.

    A hub that cannot be reached costs the run neither its result nor its good end: the way to try again is logged.
    """
    name = config.export.push_to_hub
    if not name:
        return ""
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(name, private=config.export.private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=str(directory), commit_message="A distilled student")
    except Exception as error:  # the hub's client raises many kinds
        problem = f"export.push_to_hub: {name} was not uploaded ({type(error).__name__}: {error})"
        log(f"warning: {problem}; the student lies in {directory}: `hf upload {name} {directory}` tries again")
        return problem
    log(f"the student was uploaded to {name}")
    return ""
