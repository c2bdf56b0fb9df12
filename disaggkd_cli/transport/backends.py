"""Which way the payloads of a link take (`transport.backend`), decided from what both sides say in the handshake."""

from __future__ import annotations

import torch
import torch.distributed as dist

from disaggkd_cli.errors import UserError
from disaggkd_cli.transport.cuda import Cuda
from disaggkd_cli.transport.errors import IncompatiblePeer
from disaggkd_cli.transport.identity import Identity
from disaggkd_cli.transport.link import Link
from disaggkd_cli.transport.nccl_payloads import form_nccl_payloads
from disaggkd_cli.transport.pair import form_pair
from disaggkd_cli.transport.payloads import HostPayloads, PayloadChannel, StagedPayloads

CPU = "cpu"


def describe_device(device: torch.device, wanted: str) -> dict[str, str]:
    """Return the fields of `Identity` that say where this side's payloads lie and how it would have them travel.

    Args:
        device: where this rank computes.
        wanted: `transport.backend`.

    Raises:
        UserError: `nccl` where it cannot work.
    """
    if device.type != "cuda":
        if wanted == "nccl":
            raise UserError(
                "transport.backend: nccl carries hidden states between GPUs, and this rank computes on the CPU; "
                "use auto or gloo"
            )
        return {"device": CPU, "backend": "gloo"}
    if not dist.is_nccl_available():
        if wanted == "nccl":
            raise UserError("transport.backend: nccl is not part of this build of torch; use auto or gloo")
        wanted = "gloo"
    return {"device": f"cuda {torch.cuda.get_device_properties(device).uuid}", "backend": wanted}


def agree_on_backend(student: Identity, teacher: Identity) -> str:
    """Return `nccl` or `gloo` for a link; both sides come to the same answer.

    `auto` is NCCL between two GPUs and gloo otherwise: also for two processes on one GPU, which NCCL refuses. A side
    that says nothing takes gloo.

    Raises:
        IncompatiblePeer: one side insists on NCCL and the other has none, or both compute on one GPU.
    """
    wishes = {side.role: side.backend or "gloo" for side in (student, teacher)}
    insists = [role for role, wish in wishes.items() if wish == "nccl"]
    gloo_only = [side for side in (student, teacher) if wishes[side.role] == "gloo"]
    if insists and gloo_only:
        other = gloo_only[0]
        where = " and computes on the CPU" if other.device in ("", CPU) else ""
        raise IncompatiblePeer(
            f"transport.backend: {insists[0]} has nccl, {other.role} takes gloo{where}; give both sides the same "
            "transport.backend, or auto"
        )
    if gloo_only:
        return "gloo"
    if student.device == teacher.device:
        if insists:
            raise IncompatiblePeer(
                f"transport.backend: {insists[0]} has nccl, but {student.role} and {teacher.role} share one GPU "
                f"({student.device.removeprefix('cuda ')}), which NCCL refuses; use auto or gloo"
            )
        return "gloo"
    return "nccl"


def open_payloads(
    link: Link,
    student: Identity,
    teacher: Identity,
    side: int,
    store: dist.Store,
    cuda: Cuda | None,
    *,
    forming_timeout: float,
    bind: str,
) -> PayloadChannel:
    """Return how payloads travel on a link whose handshake is done; both sides call it then.

    Args:
        side: `STUDENT` or `TEACHER`, the caller's.
        store: a connection that nobody else uses from now on.
        cuda: where the caller's payloads lie; None for the CPU.
        forming_timeout, bind: as those of the link.

    Raises:
        IncompatiblePeer: see `agree_on_backend`.
        LinkLost: the channel did not come about between the two.
    """
    if agree_on_backend(student, teacher) == "nccl" and cuda is not None:
        group_store = dist.PrefixStore(f"{link.key}/nccl", store)
        return form_nccl_payloads(group_store, side, cuda, name=link.name, timeout=link.timeout)
    # A pair of their own: one socket would keep the next READY behind the payload that travels.
    where = f"{link.key}/payloads"
    pair = form_pair(
        store, where, side, name=link.name, timeout=link.timeout, forming_timeout=forming_timeout, bind=bind
    )
    return HostPayloads(pair) if cuda is None else StagedPayloads(pair, cuda)
