"""Selection of one beam-search step on the GPU: one read of the logits, then three small exact selections.

The best W of a request are found through a tree of maxima. A row of C logits is cut into F1 groups of F2
chunks of F3 codes. A group that is not among the W best groups (by maximum, ties to the earlier one) cannot
hold a survivor: W other maxima stand before everything in it. So the W best groups are kept, of their chunks
the W best, and of those chunks' codes the W
best: three selections of about C**(1/3) * W items instead of one of C * W, exact, ties included, because
groups and chunks are contiguous in (row, code) order.

One selection of up to CAP items holds their keys in registers and searches for the W-th largest. A request
with more items is cut into segments; the last program of a request to finish merges what the segments kept.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from onela.errors import ShapeError
from onela.ops._checks import check_float, check_index, check_shape
from onela.ops.beam_select._level_kernel import NO_KEY, beam_select_level_kernel, to_key

MAX_CODES = 32768
MAX_ITEMS = 32768  # per program: 32 keys in the registers of each of 1,024 threads
NORM_LEVEL, NORM_ALLOWED, NORM_GIVEN = 0, 1, 2


@triton.jit
def _candidates(o_p, count, p_row, p_legal):
    """Logits of the legal codes at places `o_p`, -inf past the last."""
    code = tl.load(p_legal + o_p, mask=o_p < count, other=0)
    return tl.load(p_row + code, mask=o_p < count, other=-float("inf")).to(tl.float32)


@triton.jit
def beam_select_rows_kernel(
    p_logits,
    stride_logits,
    p_cum,
    p_nodes,
    p_offsets,
    p_codes,
    p_given,
    p_lognorm,
    p_first,
    p_count,
    p_group_keys,
    p_chunk_keys,
    p_done,
    num_done,
    C,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    F1: tl.constexpr,
    F2: tl.constexpr,
    F3: tl.constexpr,
    BLOCK_DONE: tl.constexpr,
    NORM: tl.constexpr,
    CONSTRAINED: tl.constexpr,
):
    """One row: its log-normalizer, and the best key of each chunk and each group of its candidates.

    Candidates are the codes, or a trie's children of the row's node in their order: then in blocks of BLOCK_P, as many
    as there are.
    """
    i_n = tl.program_id(0).to(tl.int64)
    if i_n == 0:
        o_done = tl.arange(0, BLOCK_DONE)
        tl.store(p_done + o_done, tl.zeros([BLOCK_DONE], tl.int32), mask=o_done < num_done)
    node = tl.load(p_nodes + i_n).to(tl.int64)
    cum = tl.load(p_cum + i_n)
    live = (node >= 0) & (cum > -float("inf"))
    p_row = p_logits + i_n * stride_logits
    count = C
    if CONSTRAINED:
        first = tl.load(p_offsets + node, mask=live, other=0).to(tl.int64)
        count = (tl.load(p_offsets + node + 1, mask=live, other=0) - first).to(tl.int32)
        tl.store(p_first + i_n, first)
        tl.store(p_count + i_n, count)
        p_legal = p_codes + first
    if NORM == 0 or not CONSTRAINED:
        o_c = tl.arange(0, BLOCK_C)
        x = tl.load(p_row + o_c, mask=(o_c < C) & live, other=-float("inf")).to(tl.float32)
    if NORM == 2:
        log_normalizer = tl.load(p_given + i_n).to(tl.float32)
    else:
        if CONSTRAINED and NORM == 1:
            peak = -float("inf")
            total = 0.0
            for start in range(0, count, BLOCK_P):
                y = _candidates(start + tl.arange(0, BLOCK_P), count, p_row, p_legal)
                new_peak = tl.maximum(peak, tl.max(y, 0))
                finite = tl.where(new_peak == -float("inf"), 0.0, new_peak)
                total = total * tl.exp(peak - finite) + tl.sum(tl.exp(y - finite), 0)
                peak = new_peak
            peak = tl.where(peak == -float("inf"), 0.0, peak)
        else:
            peak = tl.max(x, 0)
            peak = tl.where(peak == -float("inf"), 0.0, peak)
            total = tl.sum(tl.exp(x - peak), 0)
        log_normalizer = peak + tl.log(tl.where(total == 0.0, 1.0, total))
    tl.store(p_lognorm + i_n, log_normalizer)
    # Rounding is monotone, so the score of the largest logit is the largest score.
    F12: tl.constexpr = F1 * F2
    if CONSTRAINED:
        CHUNKS: tl.constexpr = BLOCK_P // F3
        GROUPS: tl.constexpr = CHUNKS // F2
        for start in range(0, count, BLOCK_P):
            y = _candidates(start + tl.arange(0, BLOCK_P), count, p_row, p_legal)
            keys = to_key(cum + (tl.max(tl.reshape(y, [CHUNKS, F3]), 1) - log_normalizer))
            tl.store(p_chunk_keys + i_n * F12 + start // F3 + tl.arange(0, CHUNKS), keys)
            best = tl.max(tl.reshape(keys, [GROUPS, F2]), 1)
            tl.store(p_group_keys + i_n * F1 + start // (F2 * F3) + tl.arange(0, GROUPS), best)
        blocks = (count + BLOCK_P - 1) // BLOCK_P
        o_k = tl.arange(0, F12)
        tl.store(
            p_chunk_keys + i_n * F12 + o_k, tl.full([F12], NO_KEY, tl.int32), mask=o_k >= blocks * CHUNKS
        )
        o_k = tl.arange(0, F1)
        tl.store(p_group_keys + i_n * F1 + o_k, tl.full([F1], NO_KEY, tl.int32), mask=o_k >= blocks * GROUPS)
    else:
        keys = to_key(cum + (tl.max(tl.reshape(x, [F12, F3]), 1) - log_normalizer))
        tl.store(p_chunk_keys + i_n * F12 + tl.arange(0, F12), keys)
        tl.store(p_group_keys + i_n * F1 + tl.arange(0, F1), tl.max(tl.reshape(keys, [F1, F2]), 1))


def _plan(num_codes: int) -> tuple[int, int, int, int]:
    """The padded number of codes, and its three factors, as even as powers of two can be."""
    bits = max(3, (num_codes - 1).bit_length())
    f3 = bits // 3
    f2 = (bits - f3) // 2
    return 1 << bits, 1 << (bits - f3 - f2), 1 << f2, 1 << f3


def _program(cap: int, level: int) -> tuple[int, int]:
    """Warps for a selection among `cap` items, and items of a block of its compaction; as measured."""
    if level == 3 or cap > 16384:
        return min(32, max(4, cap // 256)), min(cap, 8192)
    return min(16, max(4, cap // 512)), min(cap, 8192 if cap < 16384 else 4096)


def beam_select(
    logits: Tensor,
    *,
    cum_logprobs: Tensor,
    cu_rows: Tensor,
    cu_out: Tensor,
    trie_nodes: Tensor,
    child_offsets: Tensor | None = None,
    child_codes: Tensor | None = None,
    normalizer: Literal["level", "allowed"] | Tensor = "level",
    num_out: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Extend every beam by every legal code and keep the best of each request.

    `score[row, code] = cum_logprobs[row] + (logits[row, code] - log_normalizer[row])`.

    Args: logits: [N, C] fp32, bf16 or fp16, one column per code of the level, in code order; C at most
        32,768. cum_logprobs: [N] fp32; -inf for a row that cannot be extended. cu_rows: [B+1] int32, rows of
        each request. cu_out: [B+1] int32, survivors asked for by each request. trie_nodes: [N] int32 or
        int64, the trie node that each beam stands on; PAD for a padding row. child_offsets: [num_nodes+1],
        child_codes: [num_edges] int32: legal codes of a node, ascending; a child's node is its
            place in `child_codes`. None: every code is legal, and children are numbered 0.
        normalizer: what the logits of a row are normalised over: "level", all C codes; "allowed", the legal
            ones; or a tensor [N] of log-normalizers.
        num_out: M, at least `cu_out[-1]`; None reads it from the device, which waits for the device and
            cannot be captured.
    Returns: parent_rows: [M] int32, row that each survivor extends, PAD where a request had fewer legal
        continuations. codes: [M] int32, PAD likewise. cum_logprobs: [M] fp32, -inf likewise. child_nodes: [M]
        int64, PAD likewise.

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
        return parent_rows.fill_(-1), codes.fill_(-1), scores.fill_(float("-inf")), nodes.fill_(-1)
    block_c, f1, f2, f3 = _plan(C)
    log_normalizer = empty(N, torch.float32)
    group_keys = empty(N * f1, torch.int32)
    chunk_keys = empty(N * f1 * f2, torch.int32)
    groups, chunks = empty(M, torch.int32), empty(M, torch.int32)
    # Where a row's legal codes start in `child_codes`, and how many there are.
    first, count = empty(N, torch.int64), empty(N, torch.int32)
    done = empty(3 * B, torch.int32)
    norm = (
        NORM_GIVEN
        if isinstance(normalizer, Tensor)
        else NORM_LEVEL
        if normalizer == "level"
        else NORM_ALLOWED
    )
    constrained = child_offsets is not None
    cum_logprobs = cum_logprobs.to(torch.float32)
    beam_select_rows_kernel[(N,)](
        logits,
        logits.stride(0),
        cum_logprobs,
        trie_nodes,
        child_offsets,
        child_codes,
        normalizer if isinstance(normalizer, Tensor) else None,
        log_normalizer,
        first,
        count,
        group_keys,
        chunk_keys,
        done,
        3 * B,
        C,
        BLOCK_C=block_c,
        BLOCK_P=min(block_c, max(512, f2 * f3)),
        F1=f1,
        F2=f2,
        F3=f3,
        BLOCK_DONE=triton.next_power_of_2(3 * B),
        NORM=norm,
        CONSTRAINED=constrained,
        num_warps=2 if constrained and norm != NORM_LEVEL else min(32, max(1, block_c // 1024)),
    )
    for level, (f, keys, selected, out) in enumerate(
        (
            (f1, group_keys, groups, groups),
            (f2, chunk_keys, groups, chunks),
            (f3, chunk_keys, chunks, parent_rows),
        ),
        start=1,
    ):
        items = (N if level == 1 else M) * f
        cap = min(MAX_ITEMS, max(512, triton.next_power_of_2(triton.cdiv(items, B))))
        num_warps, sub = _program(cap, level)
        kept = empty(items + B * cap, torch.int32), empty(items + B * cap, torch.int32)
        beam_select_level_kernel[(items // cap + B,)](
            cu_rows,
            cu_out,
            keys,
            selected,
            logits,
            logits.stride(0),
            cum_logprobs,
            log_normalizer,
            first,
            count,
            child_codes,
            *kept,
            done[(level - 1) * B :],
            out,
            codes,
            scores,
            nodes,
            M,
            B,
            C,
            F=f,
            F12=f1 * f2,
            LEVEL=level,
            CONSTRAINED=constrained,
            CAP=cap,
            SUB=sub,
            BLOCK_B=triton.next_power_of_2(B),
            num_warps=num_warps,
        )
    return parent_rows, codes, scores, nodes
