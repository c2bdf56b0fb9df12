"""Several requests as one: their sequences side by side in one batch, and the answer split among them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from disaggkd_cli.transport.protocol import Request


def merge_requests(requests: Sequence[Request]) -> Request:
    """Return one request [ΣB, S] that asks for the rows of all `requests`, in order, under the first one's id.

    Raises:
        ValueError: there is none, or their sequences differ in length.
    """
    if len({request.input_ids.shape[1] for request in requests}) != 1:
        raise ValueError("requests share a forward only when their sequences are equally long")
    rows, tokens_before = [], 0
    for request in requests:
        rows.append(request.rows + tokens_before)
        tokens_before += request.num_tokens
    return replace(
        requests[0],
        input_ids=torch.cat([request.input_ids for request in requests]),
        document_lengths=torch.cat([request.document_lengths for request in requests]),
        rows=torch.cat(rows),
    )


def split_states(states: Tensor, requests: Sequence[Request]) -> list[Tensor]:
    """Return each request's [R, H] part of the merged answer [ΣR, H], as views.

    Raises:
        ValueError: the answer has another number of rows than all requests together.
    """
    counts = [request.num_rows for request in requests]
    if states.dim() != 2 or states.shape[0] != sum(counts):
        raise ValueError(f"the forward returned {tuple(states.shape)}, {sum(counts)} rows were asked for")
    return list(states.split(counts))
