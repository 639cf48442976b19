"""Selection of one beam-search step on the GPU: one read of the logits, then work on little more than the survivors.

A row of C logits is cut into groups. While the rows are read, the groups' best scores are counted in bins, one
histogram per request: the W-th best group's bin gives a bound that at least W candidates reach, and no survivor
lies below. The few candidates that reach it are counted, given places in (row, code) order, written there, and
of those the W best are kept: exact, ties included, since a bound only ever leaves out what cannot survive.

A request whose candidates do not fit their places, because too many scores tie, is selected from its W best
groups instead, by kernels that have nothing to do for all others.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
from torch import Tensor

from onela.errors import ShapeError
from onela.ops._checks import check_float, check_index, check_shape
from onela.ops.beam_select._candidate_kernels import (
    NUM_BINS,
    beam_select_best_kernel,
    beam_select_bound_kernel,
    beam_select_candidates_kernel,
    beam_select_offsets_kernel,
    beam_select_rows_kernel,
)
from onela.ops.beam_select._level_kernel import beam_select_level_kernel

MAX_CODES = 32768
MAX_ITEMS = 32768  # per program: 32 keys in the registers of each of 1,024 threads
# A request's candidates: room for this many times its width, and this many more.
SPARE, MORE = 8, 1024
NORM_LEVEL, NORM_ALLOWED, NORM_GIVEN = 0, 1, 2


def _plan(num_codes: int) -> tuple[int, int, int]:
    """The padded number of codes, and the codes of a group and of a chunk."""
    block_c = max(8, triton.next_power_of_2(num_codes))
    group = max(4, min(256, block_c // 32))
    return block_c, group, max(2, group // 16)


def beam_select(
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

    `score[row, code] = cum_logprobs[row] + (logits[row, code] - log_normalizer[row])`.

    Args:
        logits: [N, C] fp32, bf16 or fp16, one column per code of the level, in code order; C at most 32,768.
        cum_logprobs: [N] fp32; -inf for a row that cannot be extended.
        cu_rows: [B+1] int32, rows of each request. cu_out: [B+1] int32, survivors asked for by each request.
        trie_nodes: [N] int32 or int64, the trie node that each beam stands on; PAD for a padding row.
        child_offsets: [num_nodes+1], child_codes: [num_edges] int32: legal codes of a node, ascending; a
            child's node is its place in `child_codes`. None: every code is legal, and children are numbered 0.
        child_allowed: [F, ceil(num_edges/32)] int32, allowed_rows: [B]: as in `beam_select_ref`.
        normalizer: what the logits of a row are normalised over: "level", all C codes; "allowed", the legal
            ones; or a tensor [N] of log-normalizers.
        num_out: M, at least `cu_out[-1]`; None reads it from the device, which waits for the device and
            cannot be captured.
        finite: [N] bool; None: not asked for.
    Returns:
        parent_rows: [M] int32, row that each survivor extends, PAD where a request had fewer legal continuations.
        codes: [M] int32, PAD likewise. cum_logprobs: [M] fp32, -inf likewise. child_nodes: [M] int64, PAD likewise.

    Writes: finite: whether the logits of a row that were read are neither NaN nor infinite; all of them, or a trie's
        children where they are not normalised over the level; true for a row that cannot be extended.
    Layout: codes of a row contiguous, rows may be strided; everything else contiguous.
    Padding: rows whose trie node is PAD, or whose cum_logprob is -inf, have no continuation; outputs past
        `cu_out[-1]` are PAD.
    Numerics: fp32; deterministic. Equal scores go to the smaller (row, code) pair. Inside a request survivors
        stand in order of (parent row, code), PAD last. A request does not depend on the others. A NaN score
        is never chosen.
    Raises: ShapeError, DtypeError.
    """
    N, C = logits.shape
    B = cu_rows.shape[0] - 1
    check_float("logits", logits, N, C)
    check_float("cum_logprobs", cum_logprobs, N)
    check_index("cu_rows", cu_rows, B + 1)
    check_index("trie_nodes", trie_nodes, N)
    check_index("cu_out", cu_out, B + 1)
    if (child_offsets is None) != (child_codes is None):
        raise ShapeError("child_offsets and child_codes: give both or neither")
    if (child_allowed is None) != (allowed_rows is None):
        raise ShapeError("child_allowed and allowed_rows: give both or neither")
    if child_allowed is not None and allowed_rows is not None:
        if child_codes is None:
            raise ShapeError("child_allowed: needs child_offsets and child_codes")
        check_index("allowed_rows", allowed_rows, B)
        check_shape("child_allowed", child_allowed, None, -(-child_codes.shape[0] // 32))
        if child_allowed.numel() == 0:
            child_allowed = allowed_rows = None
    if finite is not None:
        check_shape("finite", finite, N)
    if C > MAX_CODES:
        raise ShapeError(f"logits: at most {MAX_CODES} codes, got {C}")
    if C and logits.stride(1) != 1:
        raise ShapeError(f"logits: the codes of a row must be contiguous, got strides {logits.stride()}")
    if isinstance(normalizer, Tensor):
        check_shape("normalizer", normalizer, N)
    M = int(cu_out[-1]) if num_out is None else num_out
    device = logits.device

    def empty(size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    parent_rows, codes, scores, nodes = (
        empty(M, torch.int32),
        empty(M, torch.int32),
        empty(M, torch.float32),
        empty(M, torch.int64),
    )
    if N == 0 or M == 0 or C == 0 or B == 0:
        if finite is not None:
            finite.fill_(True)
        return parent_rows.fill_(-1), codes.fill_(-1), scores.fill_(float("-inf")), nodes.fill_(-1)
    block_c, group, chunk = _plan(C)
    f1 = block_c // group
    block_b = triton.next_power_of_2(B)
    log_normalizer = empty(N, torch.float32)
    group_keys = empty(N * f1, torch.int32)
    bins = torch.zeros(B * NUM_BINS.value, dtype=torch.int32, device=device)
    bound, found = empty(B, torch.int32), empty(B, torch.int32)
    # Where a row's legal codes start in `child_codes`, and how many there are.
    first, count = empty(N, torch.int64), empty(N, torch.int32)
    # Parts shorten the longest row; where rows are many, the number of programs counts.
    parts = min(4, f1) if N <= 2048 else 1
    counts, done = empty(N * parts, torch.int32), empty(2 * B, torch.int32)
    norm = (
        NORM_GIVEN
        if isinstance(normalizer, Tensor)
        else NORM_LEVEL
        if normalizer == "level"
        else NORM_ALLOWED
    )
    constrained = child_offsets is not None
    masked = child_allowed is not None
    cum_logprobs = cum_logprobs.to(torch.float32)
    masks = (child_allowed, allowed_rows, 0 if child_allowed is None else child_allowed.stride(0))
    beam_select_rows_kernel[(N,)](
        logits, logits.stride(0), cum_logprobs, trie_nodes, child_offsets, child_codes, *masks,
        normalizer if isinstance(normalizer, Tensor) else None, cu_rows, cu_out, log_normalizer, finite, first,
        count, group_keys, bins, done, 2 * B, B, C, BLOCK_C=block_c, BLOCK_P=min(block_c, max(512, group)),
        GROUP=group, CHUNK=chunk, BLOCK_DONE=triton.next_power_of_2(2 * B), BLOCK_B=block_b, NORM=norm,
        CONSTRAINED=constrained, MASKED=masked, CHECKED=finite is not None,
        num_warps=2 if constrained and norm != NORM_LEVEL else min(32, max(1, block_c // 1024)),
        # More rows at once on a multiprocessor, which the memory's latency needs.
        maxnreg=None if constrained else 64,
    )  # fmt: skip
    beam_select_bound_kernel[(B,)](bins, cu_out, bound, num_warps=8)
    size = SPARE * M + MORE * B
    candidates = empty(size, torch.int32), empty(size, torch.int32), empty(size, torch.int32)
    # Where rows are few, one holds many candidates: it takes more groups at once.
    groups = min(f1 // parts, 1 if N >= 32 * B else 8)
    read = (
        logits,
        logits.stride(0),
        cum_logprobs,
        log_normalizer,
        child_codes,
        *masks,
        first,
        count,
        group_keys,
    )
    for emit in (False, True):
        beam_select_candidates_kernel[(N * parts,)](
            *read, bound, cu_rows, counts, *candidates, B, BLOCK_C=block_c, GROUP=group, GROUPS=groups,
            PARTS=parts, BLOCK_B=block_b, CONSTRAINED=constrained, MASKED=masked, EMIT=emit,
            num_warps=max(1, groups * group // 256),
        )  # fmt: skip
        if not emit:
            beam_select_offsets_kernel[(B,)](
                counts, cu_rows, cu_out, bound, found, PARTS=parts, SPARE=SPARE, MORE=MORE,
                BLOCK=1024 if N <= 256 * B else 4096, num_warps=4 if N <= 256 * B else 16,
            )  # fmt: skip
    outputs = (parent_rows, codes, scores, nodes)
    cap = min(16384, max(512, triton.next_power_of_2(2 * triton.cdiv(M, B))))
    beam_select_best_kernel[(B,)](
        *candidates, found, cu_out, first, child_codes, *outputs, M, B, SPARE=SPARE, MORE=MORE, CAP=cap,
        SUB=min(cap, 2048), CONSTRAINED=constrained, num_warps=min(16, max(4, cap // 256)),
    )  # fmt: skip
    best_groups = empty(M, torch.int32)
    for last in (False, True):
        items = M * group if last else N * f1
        cap = min(MAX_ITEMS, max(512, triton.next_power_of_2(triton.cdiv(items, B))))
        kept = empty(items + B * cap, torch.int32), empty(items + B * cap, torch.int32)
        beam_select_level_kernel[(items // cap + B,)](
            found, cu_rows, cu_out, group_keys, best_groups, logits, logits.stride(0), cum_logprobs,
            log_normalizer, first, count, child_codes, *masks, *kept, done[B if last else 0 :],
            parent_rows if last else best_groups, codes, scores, nodes, B, GROUP=group, F1=f1, LAST=last,
            CONSTRAINED=constrained, MASKED=masked, CAP=cap, SUB=min(cap, 4096), BLOCK_B=block_b,
            num_warps=min(32, max(4, cap // 512)),
        )  # fmt: skip
    return outputs
