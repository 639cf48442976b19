"""The selection's common road: a bound below every survivor, what reaches it, and the best W of that.

Every program here belongs to one row or one request; what a launch leaves is what the next one reads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from onela.ops.beam_select._level_kernel import (
    LARGEST_KEY,
    NO_KEY,
    fill,
    may_be_taken,
    places,
    put,
    threshold_of,
    to_key,
)

# Bins of keys: 128 for each power of two of a score's size, from 2**-4 up to 2**12, for either sign. What is
# smaller or larger falls into the innermost or the outermost bin of its sign.
HALF_BINS = tl.constexpr(2048)
NUM_BINS = tl.constexpr(4096)
SMALLEST = tl.constexpr((127 - 4) << 7)


@triton.jit
def bin_of(key):
    """The bin of a key; larger keys never fall into smaller bins."""
    size = tl.where(key >= 0, key, ~key) >> 16
    size = tl.minimum(tl.maximum(size - SMALLEST, 0), HALF_BINS - 1)
    return tl.where(key >= 0, HALF_BINS + size, HALF_BINS - 1 - size)


@triton.jit
def edge_of(number):
    """The least key of a bin, or one below it."""
    above = number - HALF_BINS
    size = tl.where(above >= 0, above, -above) + SMALLEST
    inner = tl.where(above > 0, size << 16, tl.where(above == 0, 0, -(size << 16)))
    return tl.where(number <= 0, NO_KEY + 1, inner)


@triton.jit
def _request_of(i_n, p_cu_rows, B, BLOCK_B: tl.constexpr):
    """The request that a row belongs to; B for a row past the last."""
    o_b = tl.arange(0, BLOCK_B)
    return tl.sum((tl.load(p_cu_rows + o_b + 1, mask=o_b < B, other=2147483647) <= i_n).to(tl.int32), 0)


@triton.jit
def _candidates(
    o_p, count, p_row, first, p_codes, p_allowed, is_masked, CONSTRAINED: tl.constexpr, MASKED: tl.constexpr
):
    """Logits of a row's candidates at places `o_p`, as they were and with -inf where there is none."""
    inside = o_p < count
    code = o_p
    if CONSTRAINED:
        code = tl.load(p_codes + first + o_p, mask=inside, other=0)
    x = tl.load(p_row + code, mask=inside, other=-float("inf")).to(tl.float32)
    y = x
    if MASKED:
        y = tl.where(may_be_taken(first + o_p, p_allowed, is_masked, inside), x, -float("inf"))
    return x, y, inside


@triton.jit
def _all_finite(x, inside):
    return tl.min((~inside | (tl.abs(x) < float("inf"))).to(tl.int32), 0)


@triton.jit
def _count(keys, p_bins):
    tl.atomic_add(p_bins + bin_of(keys), 1, mask=keys > NO_KEY, sem="relaxed")


@triton.jit
def _count_units(keys, count, want, p_bins, CODES: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr):
    """Count the maxima of a row's units: groups, or chunks or codes where there are too few of those."""
    if count >= want * GROUP:
        _count(tl.max(tl.reshape(keys, [CODES // GROUP, GROUP]), 1), p_bins)
    elif count >= want * CHUNK:
        _count(tl.max(tl.reshape(keys, [CODES // CHUNK, CHUNK]), 1), p_bins)
    else:
        _count(keys, p_bins)


@triton.jit
def beam_select_rows_kernel(
    p_logits, stride_logits, p_cum, p_nodes, p_offsets, p_codes, p_allowed, p_allowed_rows, stride_allowed,
    p_given, p_cu_rows, p_cu_out, p_lognorm, p_finite, p_first, p_count, p_group_keys, p_bins, p_done, num_done,
    B, C, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_DONE: tl.constexpr, BLOCK_B: tl.constexpr, NORM: tl.constexpr, CONSTRAINED: tl.constexpr,
    MASKED: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """One row: its log-normalizer, the best key of each group of its candidates, and its units counted in bins.

    Candidates are the codes, or a trie's children of the row's node in their order: then in blocks of BLOCK_P, as many
    as there are. Units are disjoint, so at least as many candidates as units reach a bin's edge.
    """
    i_n = tl.program_id(0).to(tl.int64)
    if i_n == 0:
        o_done = tl.arange(0, BLOCK_DONE)
        tl.store(p_done + o_done, tl.zeros([BLOCK_DONE], tl.int32), mask=o_done < num_done)
    F1: tl.constexpr = BLOCK_C // GROUP
    r = _request_of(i_n, p_cu_rows, B, BLOCK_B)
    mine = r < B
    rows = tl.load(p_cu_rows + r + 1, mask=mine, other=1) - tl.load(p_cu_rows + r, mask=mine, other=0)
    width = tl.load(p_cu_out + r + 1, mask=mine, other=0) - tl.load(p_cu_out + r, mask=mine, other=0)
    want = tl.maximum((2 * width + rows - 1) // rows, 16)
    p_bins += r * NUM_BINS
    node = tl.load(p_nodes + i_n).to(tl.int64)
    cum = tl.load(p_cum + i_n)
    live = (node >= 0) & (cum > -float("inf")) & mine
    p_row = p_logits + i_n * stride_logits
    count = tl.where(live, C, 0)
    first = node * 0
    is_masked = mine
    if CONSTRAINED:
        first = tl.load(p_offsets + node, mask=live, other=0).to(tl.int64)
        count = (tl.load(p_offsets + node + 1, mask=live, other=0) - first).to(tl.int32)
        tl.store(p_first + i_n, first)
        if MASKED:
            mask_row = tl.load(p_allowed_rows + r, mask=mine, other=-1).to(tl.int64)
            is_masked = mask_row >= 0
            p_allowed += tl.maximum(mask_row, 0) * stride_allowed
    tl.store(p_count + i_n, count)
    finite = 1
    if NORM == 0 or not CONSTRAINED:
        o_c = tl.arange(0, BLOCK_C)
        x = tl.load(p_row + o_c, mask=(o_c < C) & live, other=-float("inf")).to(tl.float32)
        if CHECKED:
            finite = _all_finite(x, (o_c < C) & live)
    if NORM == 2:
        log_normalizer = tl.load(p_given + i_n).to(tl.float32)
    else:
        if CONSTRAINED and NORM == 1:
            peak = -float("inf")
            total = 0.0
            for start in range(0, count, BLOCK_P):
                o_p = start + tl.arange(0, BLOCK_P)
                _, y, _ = _candidates(
                    o_p, count, p_row, first, p_codes, p_allowed, is_masked, CONSTRAINED, MASKED
                )
                new_peak = tl.maximum(peak, tl.max(y, 0))
                finite_peak = tl.where(new_peak == -float("inf"), 0.0, new_peak)
                total = total * tl.exp(peak - finite_peak) + tl.sum(tl.exp(y - finite_peak), 0)
                peak = new_peak
            peak = tl.where(peak == -float("inf"), 0.0, peak)
        else:
            peak = tl.max(x, 0)
            peak = tl.where(peak == -float("inf"), 0.0, peak)
            total = tl.sum(tl.exp(x - peak), 0)
        log_normalizer = peak + tl.log(tl.where(total == 0.0, 1.0, total))
    tl.store(p_lognorm + i_n, log_normalizer)
    if CONSTRAINED:
        GROUPS: tl.constexpr = BLOCK_P // GROUP
        for start in range(0, count, BLOCK_P):
            o_p = start + tl.arange(0, BLOCK_P)
            raw, legal, inside = _candidates(
                o_p, count, p_row, first, p_codes, p_allowed, is_masked, CONSTRAINED, MASKED
            )
            if CHECKED and NORM != 0:
                finite = tl.minimum(finite, _all_finite(raw, inside))
            keys = to_key(cum + (legal - log_normalizer))
            best = tl.max(tl.reshape(keys, [GROUPS, GROUP]), 1)
            tl.store(p_group_keys + i_n * F1 + start // GROUP + tl.arange(0, GROUPS), best)
            _count_units(keys, count, want, p_bins, BLOCK_P, GROUP, CHUNK)
        blocks = (count + BLOCK_P - 1) // BLOCK_P
        o_k = tl.arange(0, F1)
        tl.store(p_group_keys + i_n * F1 + o_k, tl.full([F1], NO_KEY, tl.int32), mask=o_k >= blocks * GROUPS)
    else:
        # Rounding is monotone, so the score of the largest logit is the largest score.
        keys = to_key(cum + (tl.max(tl.reshape(x, [BLOCK_C // CHUNK, CHUNK]), 1) - log_normalizer))
        best = tl.max(tl.reshape(keys, [F1, GROUP // CHUNK]), 1)
        tl.store(p_group_keys + i_n * F1 + tl.arange(0, F1), best)
        if count >= want * GROUP:
            _count(best, p_bins)
        elif count >= want * CHUNK:
            _count(keys, p_bins)
        else:
            # Few rows come here: what is read again need not be kept in registers by all others.
            for start in range(0, count, BLOCK_P):
                o_p = start + tl.arange(0, BLOCK_P)
                again = tl.load(p_row + o_p, mask=o_p < count, other=-float("inf")).to(tl.float32)
                _count(to_key(cum + (again - log_normalizer)), p_bins)
    if CHECKED:
        tl.store(p_finite + i_n, finite > 0)


@triton.jit
def beam_select_bound_kernel(p_bins, p_cu_out, p_bound):
    """One request: the edge of the last bin above which as many units lie as it wants survivors."""
    r = tl.program_id(0)
    width = tl.load(p_cu_out + r + 1) - tl.load(p_cu_out + r)
    o_n = tl.arange(0, NUM_BINS)
    above = tl.cumsum(tl.load(p_bins + r * NUM_BINS + o_n), 0, reverse=True)
    number = tl.max(tl.where(above >= width, o_n, 0), 0)
    tl.store(p_bound + r, tl.where(width > 0, edge_of(number), LARGEST_KEY))


@triton.jit
def beam_select_candidates_kernel(
    p_logits, stride_logits, p_cum, p_lognorm, p_codes, p_allowed, p_allowed_rows, stride_allowed, p_first,
    p_count, p_group_keys, p_bound, p_cu_rows, p_counts, p_candidate_keys, p_candidate_rows, p_candidate_places,
    B, BLOCK_C: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_B: tl.constexpr, CONSTRAINED: tl.constexpr, MASKED: tl.constexpr, EMIT: tl.constexpr,
):  # fmt: skip
    """One of the PARTS of a row: count its candidates that reach the bound, or write them, in order of their codes.

    GROUPS groups at once, and only where one of them holds a candidate.
    """
    i_p = tl.program_id(0)
    i_n = (i_p // PARTS).to(tl.int64)
    F1: tl.constexpr = BLOCK_C // GROUP
    F: tl.constexpr = F1 // PARTS
    r = _request_of(i_n, p_cu_rows, B, BLOCK_B)
    bound = tl.load(p_bound + r, mask=r < B, other=LARGEST_KEY)
    o_g = (i_p % PARTS) * F + tl.arange(0, F)
    holds = tl.load(p_group_keys + i_n * F1 + o_g) >= bound
    found = 0
    if EMIT:
        found = tl.load(p_counts + i_p)
    g = tl.min(tl.where(holds, o_g, F1), 0)
    if g < F1:
        cum = tl.load(p_cum + i_n)
        log_normalizer = tl.load(p_lognorm + i_n)
        count = tl.load(p_count + i_n)
        p_row = p_logits + i_n * stride_logits
        first = i_n * 0
        is_masked = r < B
        if CONSTRAINED:
            first = tl.load(p_first + i_n)
            if MASKED:
                mask_row = tl.load(p_allowed_rows + r).to(tl.int64)
                is_masked = mask_row >= 0
                p_allowed += tl.maximum(mask_row, 0) * stride_allowed
        while g < F1:
            g = g // GROUPS * GROUPS
            o_p = g * GROUP + tl.arange(0, GROUPS * GROUP)
            _, y, _ = _candidates(
                o_p, count, p_row, first, p_codes, p_allowed, is_masked, CONSTRAINED, MASKED
            )
            keys = to_key(cum + (y - log_normalizer))
            keep = (keys >= bound) & (keys > NO_KEY)
            if EMIT:
                at = found + tl.cumsum(keep.to(tl.int32), 0) - 1
                tl.store(p_candidate_keys + at, keys, mask=keep)
                tl.store(p_candidate_rows + at, tl.zeros_like(at) + i_n.to(tl.int32), mask=keep)
                tl.store(p_candidate_places + at, o_p, mask=keep)
            found += tl.sum(keep.to(tl.int32), 0)
            g = tl.min(tl.where(holds & (o_g >= g + GROUPS), o_g, F1), 0)
    if not EMIT:
        tl.store(p_counts + i_p, found)


@triton.jit
def beam_select_offsets_kernel(
    p_counts, p_cu_rows, p_cu_out, p_bound, p_found, PARTS: tl.constexpr, SPARE: tl.constexpr,
    MORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One request: where the candidates of each part of a row go, and how many there are.

    If there is no room for them: -1, and a bound that nothing reaches.
    """
    r = tl.program_id(0)
    begin, end = tl.load(p_cu_rows + r) * PARTS, tl.load(p_cu_rows + r + 1) * PARTS
    out0 = tl.load(p_cu_out + r)
    width = tl.load(p_cu_out + r + 1) - out0
    first = SPARE * out0 + MORE * r
    found = 0
    for start in range(begin, end, BLOCK):
        o_n = start + tl.arange(0, BLOCK)
        counts = tl.load(p_counts + o_n, mask=o_n < end, other=0)
        ends = tl.cumsum(counts, 0)
        tl.store(p_counts + o_n, first + found + ends - counts, mask=o_n < end)
        found += tl.max(ends, 0)
    too_many = found > SPARE * width + MORE
    tl.store(p_found + r, tl.where(too_many, -1, found))
    if too_many:
        tl.store(p_bound + r, LARGEST_KEY)


@triton.jit
def beam_select_best_kernel(
    p_candidate_keys, p_candidate_rows, p_candidate_places, p_found, p_cu_out, p_first, p_codes, p_out_rows,
    p_out_codes, p_out_scores, p_out_nodes, num_out, B, SPARE: tl.constexpr, MORE: tl.constexpr,
    CAP: tl.constexpr, SUB: tl.constexpr, CONSTRAINED: tl.constexpr,
):  # fmt: skip
    """One request: of its candidates, which stand in order of (row, code), the best W, in that order."""
    r = tl.program_id(0)
    out0 = tl.load(p_cu_out + r)
    width = tl.load(p_cu_out + r + 1) - out0
    found = tl.load(p_found + r)
    outputs = (p_out_rows, p_out_codes, p_out_scores, p_out_nodes)
    if r == 0:
        fill(tl.load(p_cu_out + B), num_out, outputs, True, 256)
    if (found >= 0) & (width > 0):
        first = SPARE * out0 + MORE * r
        threshold, wanted_equal, kept = threshold_of(p_candidate_keys + first, found, width, CAP)
        above = 0
        equal = 0
        for block in range(0, found, SUB):
            o_i = block + tl.arange(0, SUB)
            key = tl.load(p_candidate_keys + first + o_i, mask=o_i < found, other=NO_KEY)
            row = tl.load(p_candidate_rows + first + o_i, mask=o_i < found, other=0)
            place = tl.load(p_candidate_places + first + o_i, mask=o_i < found, other=0)
            keep, at, above, equal = places(key, threshold, wanted_equal, above, equal)
            put(out0 + at, keep, key, row, place, p_first, p_codes, outputs, CONSTRAINED)
        fill(out0 + kept, out0 + width, outputs, True, 256)
