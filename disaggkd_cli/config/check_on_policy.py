"""What must hold for the section `on_policy` besides what the tables of `check` say of single keys."""

from __future__ import annotations

from collections.abc import Iterator

from disaggkd_cli.config.on_policy import student_writes
from disaggkd_cli.config.schema import Config


def problems(config: Config) -> Iterator[str]:
    """Yield what is wrong with the section, as `key: reason and mend`."""
    section = config.on_policy
    if section is None:
        return
    if not 0 <= section.fraction <= 1:
        yield f"on_policy.fraction: {section.fraction} is outside 0 … 1"
    if not 0 < section.temperature < float("inf"):
        yield f"on_policy.temperature: {section.temperature} must be a number above 0"
    if not 0 < section.top_p <= 1:
        yield f"on_policy.top_p: {section.top_p} must be above 0 and at most 1"
    if section.writers == "generators":
        yield "on_policy.writers: generators cannot be run yet; set on_policy.writers=student"
    if student_writes(config):
        yield from _together(config)


def _together(config: Config) -> Iterator[str]:
    section = config.on_policy
    if section.max_new_tokens >= config.data.sequence_length:
        yield (
            f"on_policy.max_new_tokens: {section.max_new_tokens} leaves no room for a prompt within "
            f"data.sequence_length={config.data.sequence_length}; lower it, or raise data.sequence_length"
        )
    if config.data.packing == "on":
        yield "data.packing: on_policy completes one prompt a row; set data.packing=auto or off"
    if config.data.streaming:
        yield "data.streaming: on_policy looks prompts up anywhere in the texts; set data.streaming=false"
    if not config.loss.kd_weight:
        yield "loss.kd_weight: is 0, but what the student wrote is learnt from by the divergence alone; set it above 0"
    if config.teacher.cache:
        yield "teacher.cache: nothing is recorded of what the student will write; remove the key, or on_policy"
    if config.loss.vocabulary_parallel is not False:
        yield "loss.vocabulary_parallel: cannot be combined with on_policy yet; set it to false"
