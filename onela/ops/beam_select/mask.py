"""Edges that may not be taken, taken out of the logits: so the selection's kernels need not know of masks."""

from __future__ import annotations

import torch
from torch import Tensor

from onela.errors import ShapeError
from onela.ops._checks import check_index, check_shape
from onela.ops.indexing import spread


def mask_logits(
    logits: Tensor,
    *,
    cu_rows: Tensor,
    trie_nodes: Tensor,
    child_offsets: Tensor | None,
    child_codes: Tensor | None,
    child_allowed: Tensor,
    allowed_rows: Tensor,
) -> Tensor:
    """Give -inf to every code that leads a row over an edge that its request may not take.

    Args:
        logits: [N, C]. cu_rows: [B+1] int32. trie_nodes: [N]. child_offsets, child_codes, child_allowed, allowed_rows:
            as in `beam_select_ref`.
    Returns:
        [N, C] in logits' dtype; a new tensor.

    Padding: rows whose trie node or whose mask is PAD are left as they are.
    Numerics: exact; deterministic. Shapes do not depend on the masks, and nothing waits for the device.
    Raises: ShapeError, DtypeError.
    """
    N, C = logits.shape
    if child_offsets is None or child_codes is None:
        raise ShapeError("child_allowed: needs child_offsets and child_codes")
    num_edges = child_codes.shape[0]
    check_index("allowed_rows", allowed_rows, cu_rows.shape[0] - 1)
    check_shape("child_allowed", child_allowed, None, -(-num_edges // 32))
    if N == 0 or C == 0 or num_edges == 0 or child_allowed.shape[0] == 0:
        return logits.clone()
    mask_rows = spread(allowed_rows, cu_rows, N)[:, None]
    node = trie_nodes.clamp(min=0).to(torch.int64)
    first = child_offsets[node].to(torch.int64)[:, None]
    count = child_offsets[node + 1].to(torch.int64)[:, None] - first
    # A node has at most one child per code.
    place = torch.arange(C, device=logits.device)
    edges = (first + place).clamp(max=num_edges - 1)
    words = child_allowed[mask_rows.clamp(min=0), edges >> 5]
    taken = ((words >> (edges & 31).to(torch.int32)) & 1).bool()
    forbidden = ~taken & (place < count) & (mask_rows >= 0) & (trie_nodes >= 0)[:, None]
    # Whatever is not forbidden goes to one column too many, which is cut off.
    codes = child_codes[edges].to(torch.int64).masked_fill(~forbidden, C)
    mask = torch.zeros(N, C + 1, dtype=torch.bool, device=logits.device).scatter_(1, codes, True)
    return logits.masked_fill(mask[:, :C], float("-inf"))
