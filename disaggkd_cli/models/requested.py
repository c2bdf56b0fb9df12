"""What a teacher answers a request with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from disaggkd_cli.data import lengths_by_row, position_ids_from_lengths, to_device
from disaggkd_cli.models.head import hidden_states


@torch.no_grad()
def requested_states(
    backbone: nn.Module, input_ids: Tensor, document_lengths: Tensor, rows: Tensor, device: torch.device
) -> Tensor:
    """Return the hidden states [R, H] of the rows that a request asks for, on `device`.

    Without gradients, and not in inference mode, which sharded parameters do not stand.

    Args:
        backbone: in eval mode, on `device`.
        input_ids: [B, S] integers.
        document_lengths: [N] lengths of all documents, row by row.
        rows: [R] ascending indices into the flattened B * S.
    """
    documents = lengths_by_row(document_lengths, input_ids.shape[1])
    positions = to_device(position_ids_from_lengths(documents), device)
    chosen = to_device(rows.long(), device)
    states = hidden_states(backbone, to_device(input_ids.long(), device), positions, documents)
    return states.reshape(-1, states.shape[-1])[chosen]
