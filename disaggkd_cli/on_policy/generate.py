"""Generation with a cache of keys and values: prompts in, sampled token ids out.

`generate` is the one place that runs a model to write; an inference engine would stand behind the same arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache

from disaggkd_cli.on_policy.sampling import Sampler, draw, entropy


@dataclass(frozen=True)
class Written:
    """What was sampled after one prompt.

    Attributes:
        ids: with the end token, where it stopped.
        stopped: whether it stopped by itself.
        entropy: summed over the tokens, in nats.
    """

    ids: tuple[int, ...]
    stopped: bool
    entropy: float


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    numbers: np.ndarray,
    sampler: Sampler,
    ends: frozenset[int],
    pad_id: int,
    device: torch.device,
) -> list[Written]:
    """Sample a completion of each prompt, all in one batch.

    Args:
        model: a whole causal LM in eval mode, on `device`.
        prompts: [B] token ids, none empty; shorter ones are padded on the left and masked.
        numbers: [B, T] uniform numbers: number t of a row draws its token t. T is the most tokens of a completion.
        ends: ids that end a completion.
        pad_id: any id; padding is masked by its place.
    """
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad_id, dtype=torch.int64)
    mask = torch.zeros((len(prompts), width), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    ids, mask = ids.to(device), mask.to(device)
    uniform = torch.from_numpy(np.ascontiguousarray(numbers)).to(device)
    ending = torch.tensor(sorted(ends), dtype=torch.int64, device=device)
    cache = DynamicCache(config=model.config.get_text_config())
    # transformers has renamed the argument; the old name is taken by older versions only.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    padded = bool((mask == 0).any())
    chosen, nats, running = [], [], torch.ones(len(prompts), dtype=torch.bool, device=device)
    alive = []
    for step in range(uniform.shape[1]):
        out = model(
            input_ids=ids, attention_mask=mask if padded else None, position_ids=positions,
            use_cache=True, logits_to_keep=1, **{name: cache},
        )  # fmt: skip
        probabilities = sampler.probabilities(out.logits[:, -1])
        token = draw(probabilities, uniform[:, step])
        chosen.append(token)
        nats.append(entropy(probabilities))
        alive.append(running)
        running = running & ~torch.isin(token, ending)
        if not running.any():
            break
        ids, positions = token[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    tokens, sums, counted = (torch.stack(one, 1).cpu() for one in (chosen, nats, alive))
    lengths = counted.sum(1).tolist()
    stopped = (~running).cpu().tolist()
    return [
        Written(tuple(tokens[row, :length].tolist()), stopped[row], float(sums[row, :length].sum()))
        for row, length in enumerate(lengths)
    ]


def end_ids(model: nn.Module, tokenizer) -> frozenset[int]:
    """Return the ids that end a completion: the tokenizer's end token, and those of the model's generation settings."""
    found = {tokenizer.eos_token_id}
    settings = getattr(model, "generation_config", None)
    more = getattr(settings, "eos_token_id", None)
    found.update(more if isinstance(more, (list, tuple)) else [more])
    return frozenset(one for one in found if one is not None)
