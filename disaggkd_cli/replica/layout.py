"""Which of the three ways the ranks of a replica share the teacher, settled by each rank alone and by all alike."""

from __future__ import annotations

import logging

import torch

from disaggkd_cli.config import Config
from disaggkd_cli.errors import UserError
from disaggkd_cli.layouts import AUTO, FSDP, PIPELINE, asked_layout, facts_of, require
from disaggkd_cli.models import resolve_source
from disaggkd_cli.models.load import DTYPES, without_weights
from disaggkd_cli.models.stages import prove_stages

logger = logging.getLogger("disaggkd")


def settle_layout(config: Config, device: torch.device) -> str:
    """Put the parallelism that `teacher.parallelism: auto` comes to into the config, log the reason, and return it.

    `auto` takes a pipeline only where its proof succeeds on a small model of the class; else it falls back to FSDP.

    Raises:
        UserError: the teacher cannot be laid out as asked, or its configuration cannot be read.
    """
    settings = config.teacher
    if settings.parallelism != AUTO:
        return settings.parallelism
    source = resolve_source(settings.model, trust_remote_code=settings.trust_remote_code)
    model = without_weights(source, DTYPES[settings.dtype], "teacher.model")
    facts = facts_of(model.config.to_dict(), source.name, gguf=source.gguf_file is not None)
    layout, reason = asked_layout(AUTO, settings.ranks_per_replica, facts)
    settings.parallelism = layout.parallelism
    if layout.parallelism == PIPELINE:
        try:
            prove_stages(model, DTYPES[settings.dtype], device, settings.attention, source.name)
        except UserError as error:
            settings.parallelism, reason = FSDP, f"no pipeline: {error}"
    require(asked_layout(settings.parallelism, settings.ranks_per_replica, facts)[0], facts)
    logger.info("teacher.parallelism=auto: %s, since %s", settings.parallelism, reason)
    return settings.parallelism
