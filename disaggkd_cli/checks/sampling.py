"""Does the student write what its distribution says? Drawn frequencies, ids that must never come, and the cache."""

from __future__ import annotations

import numpy as np
import torch

from disaggkd_cli.checks.result import CheckResult, judge
from disaggkd_cli.checks.subject import Subject
from disaggkd_cli.data import compare_vocabularies
from disaggkd_cli.models import head_of
from disaggkd_cli.on_policy.generate import end_ids, generate
from disaggkd_cli.on_policy.prompts import prompt_of
from disaggkd_cli.on_policy.sampling import Sampler, draw
from disaggkd_cli.on_policy.uniforms import uniforms

_MOST_DRAWS, _FEWEST_DRAWS = 20_000, 1_000
_DRAWN_PROBABILITIES = 2**27
"""Draws times vocabulary, about: a few seconds of one core."""
_TOO_FAR = 5.5
"""Standard errors; among 100,000 ids a sound sampler exceeds it once in some hundred runs at most."""
_WRITTEN = 8
_ROUNDING = 1e-3


@torch.no_grad()
def check_sampling(subject: Subject) -> CheckResult:
    """Draw often after a real prompt, and write a few tokens with and without a cache."""
    section, model = subject.config.on_policy, subject.student
    sizes = (len(head_of(model).weight), len(subject.teacher_head.weight))
    ids = min(compare_vocabularies(subject.teacher_tokenizer, subject.tokenizer), *sizes)
    sampler = Sampler(section.temperature, section.top_p, section.top_k, ids)
    prompt = prompt_of(subject.sequences[0], section.prompt_tokens).tolist()
    wanted = sampler.probabilities(_logits(subject, prompt))
    draws = min(_MOST_DRAWS, max(_FEWEST_DRAWS, _DRAWN_PROBABILITIES // wanted.shape[1]))
    numbers = uniforms(subject.config.seed, "check", 0, 0, draws)
    drawn = _draw_in_parts(wanted.cpu(), numbers)
    share = torch.bincount(drawn, minlength=wanted.shape[1]).double() / draws
    expected = wanted[0].cpu()
    likely = expected * draws >= 10  # rarer ids do not follow a normal law
    error = (share - expected).abs() / (expected * (1 - expected) / draws).sqrt().clamp_min(1e-12)
    furthest = float(error[likely].max()) if likely.any() else 0.0
    forbidden = int((drawn >= ids).sum() + (expected[drawn] == 0).sum())
    texts = np.asarray([uniforms(subject.config.seed, "check", 1, 0, _WRITTEN)])
    ends = end_ids(model, subject.tokenizer)
    (text,) = generate(model, [prompt], texts, sampler, ends, subject.pad_id, subject.device)
    off = _first_disagreement(subject, sampler, prompt, text.ids, texts[0])
    return judge(
        furthest < _TOO_FAR and not forbidden and off is None,
        f"{furthest:.1f} standard errors",
        f"{draws:,} draws after {len(prompt)} real tokens, against the softmax after temperature, top_k and top_p; "
        f"{len(text.ids)} tokens written with a cache, compared with whole forwards",
        f"{forbidden} draws are of ids that must not come; the cache and a whole forward part at token {off}; the "
        "student would learn from words that are not its own",
        furthest=furthest,
        forbidden=forbidden,
    )


def _logits(subject: Subject, ids: list[int]) -> torch.Tensor:
    return subject.student(input_ids=torch.tensor([ids], device=subject.device), use_cache=False).logits[:, -1]


def _draw_in_parts(probabilities: torch.Tensor, numbers: np.ndarray, rows: int = 64) -> torch.Tensor:
    parts = torch.from_numpy(numbers).split(rows)
    return torch.cat([draw(probabilities.expand(len(part), -1), part) for part in parts])


def _first_disagreement(
    subject: Subject, sampler: Sampler, prompt: list[int], text: tuple[int, ...], numbers: np.ndarray
) -> int | None:
    """Return which token of a text a whole forward would not have drawn, however its number is rounded."""
    for at, token in enumerate(text):
        probabilities = sampler.probabilities(_logits(subject, [*prompt, *text[:at]])).cpu()
        upper = float(probabilities[0, : token + 1].sum())
        lower = upper - float(probabilities[0, token])
        if not lower - _ROUNDING <= numbers[at] <= upper + _ROUNDING:
            return at
    return None
