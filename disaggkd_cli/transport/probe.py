"""Whether two teachers of one fingerprint compute the same bits: what each makes of the same few tokens, as a hash.

The weights decide the hidden states only up to rounding; dtype, attention kernels, layout, threads and versions decide
the rest. The student ranks agree, through the rendezvous, on the probe of the first teacher that belongs to them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from disaggkd_cli.transport.authentication import NO_SECRET, Secret
from disaggkd_cli.transport.errors import IncompatiblePeer, ProtocolError
from disaggkd_cli.transport.identity import Identity
from disaggkd_cli.transport.protocol import Request
from disaggkd_cli.wire import format_of

_TOKENS = 16
_KEY = "disaggkd/probe"


def probe_request(vocabulary: int) -> Request:
    """Return the request [1, 16] that every teacher is probed with: one document, all rows."""
    ids = (torch.arange(_TOKENS, dtype=torch.int64) * 7919 + 11) % vocabulary
    rows = torch.arange(_TOKENS, dtype=torch.int32)
    return Request(0, ids.to(torch.int32)[None], torch.tensor([_TOKENS], dtype=torch.int32), rows)


def probe_of(forward: Callable[[Request], Tensor], vocabulary: int, wire_dtype: str) -> str:
    """Return 16 hexadecimal digits of what `forward` makes of the probe, as it would travel in `wire_dtype`."""
    states = forward(probe_request(vocabulary)).detach().to("cpu")
    wire = format_of(wire_dtype)
    payload = wire.payload_of(states, torch.empty(wire.payload_bytes(*states.shape), dtype=torch.uint8))
    return hashlib.blake2b(memoryview(payload.numpy()), digest_size=8).hexdigest()


def compare_probes(store: dist.Store, teacher: Identity, secret: Secret = NO_SECRET) -> str:
    """Return what is wrong when this teacher computes other bits than the run's first one; an empty text when nothing.

    A teacher that says nothing of its probe is not compared. The first one that does is what others are held against.

    Args:
        store: the rendezvous.
        secret: of the run; what it did not seal is written anew.
    """
    if not teacher.probe:
        return ""
    ours = f"{teacher.probe} {teacher.role} ({teacher.numerics})"
    sealed = secret.seal(_KEY, ours.encode()).hex()  # the store compares texts only
    try:
        first = secret.open(_KEY, bytes.fromhex(store.compare_set(_KEY, "", sealed).decode())).decode(errors="replace")
    except (ProtocolError, ValueError):
        store.set(_KEY, sealed)
        return ""
    if first.split(" ", 1)[0] == teacher.probe:
        return ""
    return (
        f"same weights, other bits: of the same tokens {teacher.role} ({teacher.numerics}) makes {teacher.probe}, and "
        f"the first teacher of this run {first.partition(' ')[2]} {first.split(' ', 1)[0]}"
    )


def refuse_other_bits(store: dist.Store, teacher: Identity, secret: Secret = NO_SECRET) -> None:
    """Return quietly when this teacher computes the same bits as the run's first one.

    Raises:
        IncompatiblePeer: with both and the mend.
    """
    if problem := compare_probes(store, teacher, secret):
        raise IncompatiblePeer(
            f"{problem}; give all teachers the same teacher.dtype, attention, layout, threads and versions, or set "
            "transport.mixed_teachers=true on the student for a run that is not reproducible bit for bit"
        )
