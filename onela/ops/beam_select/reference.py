"""Selection of one beam-search step in plain PyTorch: mask, log-softmax, accumulate, best W of each request."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from onela.errors import ShapeError
from onela.ops._checks import check_float, check_index, check_shape
from onela.ops.indexing import spread

NEG_INF = float("-inf")


def beam_select_ref(
    logits: Tensor,
    *,
    cum_logprobs: Tensor,
    cu_rows: Tensor,
    cu_out: Tensor,
    trie_nodes: Tensor,
    child_offsets: Tensor | None = None,
    child_codes: Tensor | None = None,
    child_allowed: Tensor | None = None,
    allowed_rows: Tensor | None = None,
    normalizer: Literal["level", "allowed"] | Tensor = "level",
    num_out: int | None = None,
    finite: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Extend every beam by every legal code and keep the best of each request.

    `score[row, code] = cum_logprobs[row] + logits[row, code] - log_normalizer[row]`.

    Args:
        logits: [N, C], one column per code of the level, in code order.
        cum_logprobs: [N] fp32; -inf for a row that cannot be extended.
        cu_rows: [B+1] int32, rows of each request. cu_out: [B+1] int32, survivors asked for by each request.
        trie_nodes: [N] int32 or int64, the trie node that each beam stands on; PAD for a padding row.
        child_offsets: [num_nodes+1], child_codes: [num_edges] int32: legal codes of a node, ascending; a child's node
            is its place in `child_codes`. None: every code is legal, and children are numbered 0.
        child_allowed: [F, ceil(num_edges/32)] int32, rows may be strided: bit `e % 32` of word `e // 32` says
            whether edge `e` may be taken. allowed_rows: [B] int32, the row of `child_allowed` that holds for a
            request; PAD: none, all its edges may be taken. An edge that may not be taken is not legal.
        normalizer: what the logits of a row are normalised over: "level", all C codes; "allowed", the legal
            ones; or a tensor [N] of log-normalizers (for example of the whole vocabulary).
        num_out: M, at least `cu_out[-1]`; None: `cu_out[-1]`, which a kernel can only learn by waiting for
            the device.
        finite: [N] bool; None: not asked for.
    Returns:
        parent_rows: [M] int32, row that each survivor extends, PAD where a request had fewer legal continuations.
        codes: [M] int32, PAD likewise.
        cum_logprobs: [M] fp32, -inf likewise.
        child_nodes: [M] int64, PAD likewise.

    Writes: finite: whether the logits of a row that were read are neither NaN nor infinite: all of them, or a trie's
        children where they are not normalised over the level; true for a row that has no continuation.
    Padding: rows whose trie node is PAD, or whose cum_logprob is -inf, have no continuation; outputs past
        `cu_out[-1]` are PAD.
    Numerics: fp32; deterministic. Equal scores go to the smaller (row, code) pair. Inside a request survivors
        stand in order of (parent row, code), PAD last: siblings are neighbours. A request does not depend on
        the others.
    Raises: ShapeError, DtypeError.
    """
    N, C = logits.shape
    check_float("logits", logits, N, C)
    check_float("cum_logprobs", cum_logprobs, N)
    check_index("trie_nodes", trie_nodes, N)
    check_index("cu_out", cu_out, cu_rows.shape[0])
    if (child_offsets is None) != (child_codes is None):
        raise ShapeError("child_offsets and child_codes: give both or neither")
    if (child_allowed is None) != (allowed_rows is None):
        raise ShapeError("child_allowed and allowed_rows: give both or neither")
    logits = logits.to(torch.float32)
    rows, codes, children = _candidates(trie_nodes, cum_logprobs, C, child_offsets, child_codes)
    if finite is not None:
        check_shape("finite", finite, N)
        usable = torch.isfinite(logits)
        if child_codes is None or (not isinstance(normalizer, Tensor) and normalizer == "level"):
            finite.copy_(usable.all(-1) | (trie_nodes < 0) | ~(cum_logprobs > NEG_INF))
        else:
            finite.fill_(True)
            finite[rows[~usable[rows, codes]]] = False
    if child_allowed is not None and allowed_rows is not None:
        check_index("allowed_rows", allowed_rows, cu_rows.shape[0] - 1)
        if child_codes is None:
            raise ShapeError("child_allowed: needs child_offsets and child_codes")
        check_shape("child_allowed", child_allowed, None, -(-child_codes.shape[0] // 32))
        legal = _may_be_taken(children, spread(allowed_rows, cu_rows, N)[rows], child_allowed)
        rows, codes, children = rows[legal], codes[legal], children[legal]
    raw = logits[rows, codes]
    if isinstance(normalizer, Tensor):
        check_float("normalizer", normalizer, N)
        log_normalizer = normalizer.to(torch.float32)
    elif normalizer == "level":
        log_normalizer = logits.logsumexp(-1)
    else:
        log_normalizer = _segment_logsumexp(raw, rows, N)
    scores = cum_logprobs.to(torch.float32)[rows] + (raw - log_normalizer[rows])

    M = int(cu_out[-1]) if num_out is None else num_out
    device = logits.device
    parent_rows = torch.full((M,), -1, dtype=torch.int32, device=device)
    out_codes = torch.full((M,), -1, dtype=torch.int32, device=device)
    out_scores = torch.full((M,), NEG_INF, dtype=torch.float32, device=device)
    out_nodes = torch.full((M,), -1, dtype=torch.int64, device=device)
    row_bounds, out_bounds = cu_rows.tolist(), cu_out.tolist()
    borders = torch.searchsorted(rows, torch.tensor(row_bounds, device=device)).tolist()
    for r in range(len(row_bounds) - 1):
        part = slice(borders[r], borders[r + 1])
        kept = _best(scores[part], out_bounds[r + 1] - out_bounds[r]) + borders[r]
        to = slice(out_bounds[r], out_bounds[r] + kept.shape[0])
        parent_rows[to] = rows[kept].to(torch.int32)
        out_codes[to] = codes[kept].to(torch.int32)
        out_scores[to] = scores[kept]
        out_nodes[to] = children[kept]
    return parent_rows, out_codes, out_scores, out_nodes


def _candidates(
    nodes: Tensor, cum_logprobs: Tensor, C: int, child_offsets: Tensor | None, child_codes: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """All legal (row, code, child node), in (row, code) order."""
    live = (nodes >= 0) & (cum_logprobs > NEG_INF)
    if child_offsets is None or child_codes is None:
        rows = live.nonzero()[:, 0].repeat_interleave(C)
        codes = torch.arange(C, device=nodes.device).repeat(int(live.sum()))
        return rows, codes, torch.zeros_like(rows)
    node = nodes.clamp(min=0).to(torch.int64)
    first = child_offsets[node].to(torch.int64)
    counts = (child_offsets[node + 1].to(torch.int64) - first).where(live, first.new_zeros(()))
    rows = torch.arange(nodes.shape[0], device=nodes.device).repeat_interleave(counts)
    starts = counts.cumsum(0) - counts
    children = torch.arange(rows.shape[0], device=nodes.device) - starts[rows] + first[rows]
    return rows, child_codes[children].to(torch.int64), children


def _may_be_taken(edges: Tensor, mask_rows: Tensor, child_allowed: Tensor) -> Tensor:
    """Whether each edge's bit is set in its row of the masks; PAD: no mask."""
    if child_allowed.shape[0] == 0:
        return mask_rows < 0
    words = child_allowed[mask_rows.clamp(min=0), edges >> 5]
    return (mask_rows < 0) | ((words >> (edges & 31).to(torch.int32)) & 1).bool()


def _segment_logsumexp(values: Tensor, rows: Tensor, N: int) -> Tensor:
    """Log-sum-exp of the values of each row; 0 for a row without values."""
    peak = values.new_full((N,), NEG_INF).scatter_reduce(0, rows, values, "amax")
    total = values.new_zeros(N).scatter_add(0, rows, (values - peak[rows]).exp())
    return torch.where(total > 0, peak + total.log(), total)


def _best(scores: Tensor, width: int) -> Tensor:
    """Places of the `width` largest finite scores, ascending; among equal ones the first places win."""
    width = min(width, scores.shape[0])
    if width <= 0:
        return torch.empty(0, dtype=torch.int64, device=scores.device)
    threshold = torch.topk(scores, width, sorted=True).values[-1]
    above = scores > threshold
    tied = (scores == threshold) & (scores > NEG_INF)
    keep = above | (tied & (tied.cumsum(0) <= width - above.sum()))
    return keep.nonzero()[:, 0]
