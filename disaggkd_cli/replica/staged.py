"""A teacher divided into stages: proved on a small model of its class, read stage by stage, divided by measurements.

The layers are dealt out by how many parameters a token meets in each, or by their bytes where a stage would not fit
so. Then every stage measures its layers on a full micro-batch; where another division fits and makes the slowest stage
faster by more than `WORTH_MOVING`, the stages are read once more. Which rank holds a layer changes no bit, so
measurements may differ from start to start.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import transformers
from torch import nn

from disaggkd_cli.config import Config
from disaggkd_cli.errors import RunError, UserError
from disaggkd_cli.layouts import Layout, facts_of, require
from disaggkd_cli.layouts.stages import describe, divide_layers, fullest, heaviest, measured_division
from disaggkd_cli.models import model_fingerprint, require_attention, teacher_source
from disaggkd_cli.models.load import DTYPES, ModelSource, without_weights
from disaggkd_cli.models.load_stage import layer_bytes, layer_costs, layer_seconds, load_stage, stage_bytes
from disaggkd_cli.models.stages import Anatomy, Stage, prove_stages
from disaggkd_cli.models.values import verify_weights
from disaggkd_cli.replica.world import World
from disaggkd_cli.transport.identity import Identity
from disaggkd_cli.units import format_bytes

logger = logging.getLogger("disaggkd")
Division = tuple[tuple[int, int], ...]
"""`(start, stop)` of every stage."""


@dataclass(frozen=True)
class StagedTeacher:
    """This rank's stage of a teacher.

    Attributes:
        source: where it was read from.
        stage: its layers, on the device that computes them.
        anatomy: of its class.
        division: `(start, stop)` of every stage.
        vocabulary_size, hidden_size: V_t and H_t.
        identities: of all ranks, by rank: where each computes and how payloads may travel.
    """

    source: ModelSource
    stage: Stage
    anatomy: Anatomy
    division: tuple[tuple[int, int], ...]
    vocabulary_size: int
    hidden_size: int
    identities: list[Identity]


def load_staged_teacher(config: Config, device: torch.device, world: World, identity: Identity) -> StagedTeacher:
    """Return this rank's stage of the teacher. Collective over the ranks of `world`.

    Args:
        identity: says where this rank computes.

    Raises:
        UserError: the model cannot be read or cut into stages, or the ranks read different ones.
        RunError: another rank ended meanwhile.
    """
    settings = config.teacher
    require_attention(settings.attention, "teacher.attention")
    source = teacher_source(config)
    model = without_weights(source, DTYPES[settings.dtype], "teacher.model")
    require(
        Layout("pipeline", world.size), facts_of(model.config.to_dict(), source.name, gguf=source.gguf_file is not None)
    )
    anatomy = prove_stages(model, DTYPES[settings.dtype], device, settings.attention, source.name)
    vocabulary, width = model.get_output_embeddings().weight.shape
    costs, (sizes, before, after) = layer_costs(model, anatomy), layer_bytes(model, anatomy)
    room = _room(world, device)

    def fullest_of(division: Division) -> tuple[int, float]:
        return fullest(sizes, division, room, before=before, after=after)

    by_bytes = divide_layers(sizes, world.size, before=before, after=after)
    division = _first_that_fits((divide_layers(costs, world.size), by_bytes), fullest_of, room)

    def load() -> Stage:
        stage = load_stage(source, model, anatomy, division[world.rank], settings.attention)
        stage.backbone.to(device)
        verify_weights(stage.backbone, f"teacher.model {source.name}")
        return stage

    stage = load()
    identities = _agree(world, source, stage, anatomy, model, identity)
    seconds = _measure(config, world, stage, anatomy, vocabulary, width)
    ideal = divide_layers(seconds, world.size)
    now, then = (f"slowest {1000 * heaviest(seconds, one):,.1f} ms" for one in (division, ideal))
    logger.info("stages by parameters: %s (%s)", describe(division), now)
    logger.info("stages by measured time: %s (%s)", describe(ideal), then)
    better, gain = measured_division(seconds, division)
    if gain and fullest_of(better)[1] < 0:
        logger.info("layers stay where they are: the fullest stage would not fit in its memory")
    elif gain:
        division = better
        del stage
        stage = load()
        _agree(world, source, stage, anatomy, model, identity)
        logger.info("layers moved once: the slowest stage takes %.0f%% less", 100 * gain)
    logger.info(
        "%s holds layers %d-%d of %d, %.3f GiB", world.name, division[world.rank][0], division[world.rank][1] - 1,
        len(costs), stage_bytes(stage) / 2**30,
    )  # fmt: skip
    return StagedTeacher(source, stage, anatomy, division, vocabulary, width, identities)


def _room(world: World, device: torch.device) -> list[float]:
    """Return the memory of every stage's GPU that is free for weights, in bytes; without bound on CPUs."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf
    return [float(text) for text in world.gather(str(free))]


def _first_that_fits(
    divisions: Sequence[Division], fullest_of: Callable[[Division], tuple[int, float]], room: list[float]
) -> Division:
    """Return the first division whose fullest stage fits.

    Raises:
        UserError: none does; what is said is of the last one.
    """
    for division in divisions:
        stage, left = fullest_of(division)
        if left >= 0:
            return division
    raise UserError(
        f"teacher.ranks_per_replica: stage {stage} of {len(room)} has {format_bytes(room[stage])} of GPU memory free, "
        f"and its weights need {format_bytes(-left)} more; use more ranks, or a smaller teacher.dtype"
    )


def _agree(
    world: World, source: ModelSource, stage: Stage, anatomy: Anatomy, model: nn.Module, identity: Identity
) -> list[Identity]:
    """Compare what all ranks hold and return who they are.

    Raises:
        UserError: they read different models, or compute with different versions, or a layer is missing or twice there.
    """
    mine = {
        "weights and config.json": model_fingerprint(source),
        "dtype": str(next(model.parameters()).dtype),
        "dtype between layers": str(anatomy.dtype),
        "version of torch": torch.__version__,
        "version of transformers": transformers.__version__,
        "layers": [stage.layers.start, stage.layers.stop],
        "identity": identity.encode().decode(),
    }
    theirs = [json.loads(text) for text in world.gather(json.dumps(mine))]
    for rank, other in enumerate(theirs):
        for name in mine.keys() - {"layers", "identity"}:
            if other[name] != theirs[0][name]:
                raise UserError(
                    f"teacher.model: the ranks of a pipeline differ in their {name}: {world.names[0]} has "
                    f"{theirs[0][name]}, {world.names[rank]} has {other[name]}; give all of them the same"
                )
    held = [number for other in theirs for number in range(*other["layers"])]
    count = model.config.get_text_config().num_hidden_layers
    if held != list(range(count)):
        raise RunError(f"{world.name}: the stages hold layers {held}, not each of {count} once")
    return [Identity.decode(other["identity"].encode()) for other in theirs]


def _measure(config: Config, world: World, stage: Stage, anatomy: Anatomy, vocabulary: int, width: int) -> list[float]:
    """Return the seconds of every layer of the teacher for a full micro-batch, measured by all stages together."""
    batch, sequence = config.train.micro_batch_sequences, config.data.sequence_length
    world.gather("ready")
    mine = layer_seconds(stage, batch, sequence, width, vocabulary, anatomy.dtype)
    return [one for text in world.gather(json.dumps(mine)) for one in json.loads(text)]
