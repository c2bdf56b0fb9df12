"""Uniform numbers that are a function of their place: whoever draws them, in whatever order and batch, draws the same.

Raw outputs of the Philox counter generator (Salmon et al., SC 2011), keyed by the seed; the counter names the sample.
Raw outputs are used because NumPy keeps those of a bit generator stable across its releases.
"""

from __future__ import annotations

import hashlib

import numpy as np

_BITS = 53


def uniforms(seed: int, purpose: str, place: int, sample: int, count: int) -> np.ndarray:
    """[count] float64 in [0, 1): number t decides token t of one sample.

    Args:
        seed: the run's.
        purpose: keeps the numbers of training apart from those of evaluation.
        place: of the prompt in the endless stream of training sequences, which names epoch and prompt alike.
        sample: which of the completions of that prompt, from 0.
    """
    digest = hashlib.sha256(f"disaggkd on_policy {purpose} seed={seed}".encode()).digest()
    key = np.frombuffer(digest[:16], dtype="<u8").astype(np.uint64)
    # The lowest word counts blocks of four outputs, so a sample of up to 2^66 tokens never meets its neighbour's.
    generator = np.random.Philox(key=key, counter=np.array([0, sample, place, 0], np.uint64))
    return (generator.random_raw(count) >> np.uint64(64 - _BITS)).astype(np.float64) * 2.0**-_BITS
