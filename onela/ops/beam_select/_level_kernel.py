"""Exact selections among any number of keys: the parts, and the road for requests whose scores tie too often."""

from __future__ import annotations

import triton
import triton.language as tl

# The key of -inf: scores are compared as int32 of the same order, and nothing at or below this one is ever
# chosen.
NO_KEY = tl.constexpr(-2139095041)
LARGEST_KEY = tl.constexpr(2147483646)


@triton.jit
def to_key(score):
    """fp32 -> int32 of the same order; NaN counts as -inf, and -0 as +0."""
    score = tl.where(score == score, score, -float("inf"))
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def to_score(key):
    """The inverse of `to_key`."""
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def may_be_taken(edge, p_allowed, is_masked, inside):
    """Whether a request's mask, if it has one, has an edge's bit set."""
    word = tl.load(p_allowed + (edge >> 5), mask=inside & is_masked, other=-1)
    return ((word >> (edge & 31).to(tl.int32)) & 1) != 0


@triton.jit
def _bracket(low, high, legal, width):
    """Start of a search between the least and the largest key: [low, high) holds the threshold."""
    want = tl.minimum(width, legal)
    return tl.where(want == legal, low, high) + (want > 0).to(tl.int32), want


@triton.jit
def _threshold(key, width):
    """The `width`-th largest of keys in registers, how many equal to it are wanted, and how many in all."""
    low = tl.min(tl.where(key > NO_KEY, key, LARGEST_KEY), 0)
    high, want = _bracket(low, tl.max(key, 0), tl.sum((key > NO_KEY).to(tl.int32), 0), width)
    while low + 1 < high:
        middle = (low & high) + ((low ^ high) >> 1)
        count = tl.sum((key >= middle).to(tl.int32), 0)
        # An exact hit ends the search.
        high = tl.where(count > want, high, tl.where(count == want, middle + 1, middle))
        low = tl.where(count >= want, middle, low)
    return low, want - tl.sum((key > low).to(tl.int32), 0), want


@triton.jit
def _guess(low, high, count_low, count_high, want, turn):
    """Where to cut [low, high): tails fall about exponentially, so the counts' logarithms are interpolated.

    Every third cut is in the middle, which bounds the search whatever the scores are.
    """
    top = tl.log2(count_low.to(tl.float32))
    bottom = tl.log2(tl.maximum(count_high.to(tl.float32), 0.5))
    part = (top - tl.log2(want.to(tl.float32))) / (top - bottom)
    part = tl.where(turn % 3 == 2, 0.5, part)
    size = high.to(tl.int64) - low.to(tl.int64)
    step = (part * size.to(tl.float32)).to(tl.int64)
    return (low + tl.minimum(tl.maximum(step, 1), size - 1)).to(tl.int32)


@triton.jit
def _threshold_in_memory(p_keys, n, width, CAP: tl.constexpr):
    """The same over more keys than registers hold: each turn reads them all, so that turns are saved."""
    o_j = tl.arange(0, CAP)
    count_low = 0
    low = LARGEST_KEY
    high = NO_KEY
    for block in range(0, n, CAP):
        key = tl.load(p_keys + block + o_j, mask=block + o_j < n, other=NO_KEY, cache_modifier=".cg")
        count_low += tl.sum((key > NO_KEY).to(tl.int32), 0)
        low = tl.minimum(low, tl.min(tl.where(key > NO_KEY, key, LARGEST_KEY), 0))
        high = tl.maximum(high, tl.max(key, 0))
    count_high = count_low * 0
    high, want = _bracket(low, high, count_low, width)
    turn = 0
    while low + 1 < high:
        cut = _guess(low, high, count_low, count_high, want, turn)
        count = 0
        for block in range(0, n, CAP):
            key = tl.load(p_keys + block + o_j, mask=block + o_j < n, other=NO_KEY, cache_modifier=".cg")
            count += tl.sum((key >= cut).to(tl.int32), 0)
        up = count >= want
        high = tl.where(count > want, high, tl.where(count == want, cut + 1, cut))
        low = tl.where(up, cut, low)
        count_low = tl.where(up, count, count_low)
        count_high = tl.where(up, count_high, count)
        turn += 1
    above = 0
    for block in range(0, n, CAP):
        key = tl.load(p_keys + block + o_j, mask=block + o_j < n, other=NO_KEY, cache_modifier=".cg")
        above += tl.sum((key > low).to(tl.int32), 0)
    return low, want - above, want


@triton.jit
def threshold_of(p_keys, n, width, CAP: tl.constexpr):
    """The `width`-th largest of n keys, how many equal to it are wanted, and how many in all."""
    threshold = NO_KEY
    wanted_equal = n * 0
    kept = n * 0
    if n <= CAP:
        o_j = tl.arange(0, CAP)
        key = tl.load(p_keys + o_j, mask=o_j < n, other=NO_KEY, cache_modifier=".cg")
        threshold, wanted_equal, kept = _threshold(key, width)
    else:
        threshold, wanted_equal, kept = _threshold_in_memory(p_keys, n, width, CAP)
    return threshold, wanted_equal, kept


@triton.jit
def places(key, threshold, wanted_equal, above_before, equal_before):
    """Which keys of a block stay and where (a stable compaction), and the counts for the next block."""
    above = key > threshold
    equal = key == threshold
    # Both counts, of at most 32,768, run in one scan: over 32 neighbours within a warp, then over the sums of those.
    ones = tl.reshape(above.to(tl.int32) + (equal.to(tl.int32) << 16), [above.shape[0] // 32, 32])
    sums = tl.sum(ones, 1)
    counts = tl.reshape(tl.cumsum(ones, 1) + (tl.cumsum(sums, 0) - sums)[:, None], [above.shape[0]])
    num_above = (counts & 0xFFFF) + above_before
    num_equal = ((counts >> 16) & 0xFFFF) + equal_before
    keep = above | (equal & (num_equal <= wanted_equal))
    at = num_above + tl.minimum(num_equal, wanted_equal) - 1
    return keep, at, tl.max(num_above, 0), tl.max(num_equal, 0)


@triton.jit
def put(at, keep, key, row, place, p_first, p_codes, outputs, CONSTRAINED: tl.constexpr):
    """Survivors to their places of the output; a child's node is its place among all edges."""
    child = tl.zeros_like(at).to(tl.int64)
    code = place
    if CONSTRAINED:
        child = tl.load(p_first + row, mask=keep, other=0) + place
        code = tl.load(p_codes + child, mask=keep, other=0).to(tl.int32)
    tl.store(outputs[0] + at, row.to(tl.int32), mask=keep)
    tl.store(outputs[1] + at, code, mask=keep)
    tl.store(outputs[2] + at, to_score(key), mask=keep)
    tl.store(outputs[3] + at, child, mask=keep)


@triton.jit
def fill(start, end, outputs, LAST: tl.constexpr, BLOCK: tl.constexpr):
    """PAD from `start` up to `end`."""
    for block in range(start, end, BLOCK):
        at = block + tl.arange(0, BLOCK)
        tl.store(outputs[0] + at, tl.full([BLOCK], -1, tl.int32), mask=at < end)
        if LAST:
            tl.store(outputs[1] + at, tl.full([BLOCK], -1, tl.int32), mask=at < end)
            tl.store(outputs[2] + at, tl.full([BLOCK], -float("inf"), tl.float32), mask=at < end)
            tl.store(outputs[3] + at, tl.full([BLOCK], -1, tl.int64), mask=at < end)


@triton.jit
def _item_keys(
    i, n, r, request, sources, GROUP: tl.constexpr, F1: tl.constexpr, LAST: tl.constexpr,
    CONSTRAINED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys of the items `i` of a request, NO_KEY where there is none, and the items' rows and places."""
    (
        p_group_keys, p_groups, p_logits, stride_logits, p_cum, p_lognorm, p_first, p_count, p_codes, p_allowed,
        p_allowed_rows, stride_allowed,
    ) = sources  # fmt: skip
    valid = i < n
    row = request[0] + i // F1
    place = i % F1
    if LAST:
        group = tl.load(p_groups + request[1] + i // GROUP, mask=valid, other=-1)
        valid = valid & (group >= 0)
        group = tl.where(valid, group, 0)
        row = (group // F1).to(tl.int64)
        place = (group % F1) * GROUP + i % GROUP
        valid = valid & (place < tl.load(p_count + row, mask=valid, other=0))
        code = place
        if CONSTRAINED:
            child = tl.load(p_first + row, mask=valid, other=0) + place
            code = tl.load(p_codes + child, mask=valid, other=0).to(tl.int32)
            if MASKED:
                mask_row = tl.load(p_allowed_rows + r).to(tl.int64)
                p_allowed += tl.maximum(mask_row, 0) * stride_allowed
                valid = valid & may_be_taken(child, p_allowed, mask_row >= 0, valid)
        x = tl.load(p_logits + row * stride_logits + code, mask=valid, other=-float("inf")).to(tl.float32)
        cum = tl.load(p_cum + row, mask=valid, other=-float("inf"))
        log_normalizer = tl.load(p_lognorm + row, mask=valid, other=0.0)
        key = tl.where(valid, to_key(cum + (x - log_normalizer)), NO_KEY)
    else:
        key = tl.load(p_group_keys + request[0] * F1 + i, mask=valid, other=NO_KEY)
    return key, row, place


@triton.jit
def _emit(
    i, keep, at, key, row, place, request, sources, outputs, F1: tl.constexpr, LAST: tl.constexpr,
    CONSTRAINED: tl.constexpr,
):  # fmt: skip
    """Write the kept items to their places `at` of the request's output."""
    at = request[1] + at
    if LAST:
        put(at, keep, key, row, place, sources[6], sources[8], outputs, CONSTRAINED)
    else:
        tl.store(outputs[0] + at, (request[0] * F1 + i).to(tl.int32), mask=keep)


@triton.jit
def beam_select_level_kernel(
    p_found, p_cu_rows, p_cu_out, p_group_keys, p_groups, p_logits, stride_logits, p_cum, p_lognorm, p_first,
    p_count, p_codes, p_allowed, p_allowed_rows, stride_allowed, p_kept_keys, p_kept_items, p_done, p_out,
    p_out_codes, p_out_scores, p_out_nodes, B, GROUP: tl.constexpr, F1: tl.constexpr, LAST: tl.constexpr,
    CONSTRAINED: tl.constexpr, MASKED: tl.constexpr, CAP: tl.constexpr, SUB: tl.constexpr,
    BLOCK_B: tl.constexpr,
):  # fmt: skip
    """For requests that have been given up (`p_found` -1): their W best groups, or (LAST) of those the W best codes.

    A group that is not among the W best (by its best key, ties to the earlier one) cannot hold a survivor: W other
    maxima stand before everything in it. One program per segment of CAP items of a request; the last to finish merges
    what the segments kept. Compaction by blocks of SUB keeps registers free.
    """
    i_p = tl.program_id(0)
    FACTOR: tl.constexpr = GROUP if LAST else F1
    o_b = tl.arange(0, BLOCK_B)
    rows_low = tl.load(p_cu_rows + o_b, mask=o_b < B, other=0)
    rows_high = tl.load(p_cu_rows + o_b + 1, mask=o_b < B, other=0)
    widths = tl.load(p_cu_out + o_b + 1, mask=o_b < B, other=0) - tl.load(
        p_cu_out + o_b, mask=o_b < B, other=0
    )
    if LAST:
        items = widths * FACTOR
    else:
        items = (rows_high - rows_low) * FACTOR
    segments = tl.where(widths > 0, tl.maximum((items + CAP - 1) // CAP, 1), 0)
    ends = tl.cumsum(segments, 0)
    r = tl.sum((ends <= i_p).to(tl.int32), 0)
    if tl.load(p_found + r, mask=r < B, other=0) < 0:
        outputs = (p_out, p_out_codes, p_out_scores, p_out_nodes)
        num_segments = tl.sum(tl.where(o_b == r, segments, 0), 0)
        i_s = i_p - tl.sum(tl.where(o_b == r, ends - segments, 0), 0)
        n = tl.sum(tl.where(o_b == r, items, 0), 0)
        width = tl.sum(tl.where(o_b == r, widths, 0), 0)
        request = (tl.load(p_cu_rows + r).to(tl.int64), tl.load(p_cu_out + r).to(tl.int64))
        sources = (
            p_group_keys, p_groups, p_logits, stride_logits, p_cum, p_lognorm, p_first, p_count, p_codes, p_allowed,
            p_allowed_rows, stride_allowed,
        )  # fmt: skip
        base = (request[1] if LAST else request[0]) * FACTOR + r * CAP
        p_kept_keys += base
        p_kept_items += base
        per_segment = tl.minimum(width, CAP)

        o_a = i_s * CAP + tl.arange(0, CAP)
        all_keys, _all_rows, _all_places = _item_keys(
            o_a, n, r, request, sources, GROUP, F1, LAST, CONSTRAINED, MASKED
        )
        threshold, wanted_equal, kept = _threshold(all_keys, width)
        above = 0
        equal = 0
        for block in range(0, CAP, SUB):
            o_i = i_s * CAP + block + tl.arange(0, SUB)
            key, row, place = _item_keys(o_i, n, r, request, sources, GROUP, F1, LAST, CONSTRAINED, MASKED)
            keep, at, above, equal = places(key, threshold, wanted_equal, above, equal)
            if num_segments == 1:
                _emit(o_i, keep, at, key, row, place, request, sources, outputs, F1, LAST, CONSTRAINED)
            else:
                tl.store(p_kept_keys + i_s * per_segment + at, key, mask=keep)
                tl.store(p_kept_items + i_s * per_segment + at, o_i, mask=keep)
        last = num_segments == 1
        if num_segments > 1:
            # A segment leaves NO_KEY in those of its places that it does not need.
            for block in range(kept, per_segment, SUB):
                o_hole = block + tl.arange(0, SUB)
                no_keys = tl.full([SUB], NO_KEY, tl.int32)
                tl.store(p_kept_keys + i_s * per_segment + o_hole, no_keys, mask=o_hole < per_segment)
            # All stores of a program come before its arrival; the last to arrive sees those of
            # all the others.
            tl.debug_barrier()
            last = tl.atomic_add(p_done + r, 1, sem="acq_rel", scope="gpu") == num_segments - 1
            if last:
                tl.debug_barrier()
                num_kept = num_segments * per_segment
                threshold, wanted_equal, kept = threshold_of(p_kept_keys, num_kept, width, CAP)
                above = 0
                equal = 0
                for block in range(0, num_kept, SUB):
                    o_j = block + tl.arange(0, SUB)
                    key = tl.load(p_kept_keys + o_j, mask=o_j < num_kept, other=NO_KEY, cache_modifier=".cg")
                    item = tl.load(p_kept_items + o_j, mask=key > NO_KEY, other=0, cache_modifier=".cg")
                    _again, row, place = _item_keys(
                        item, n, r, request, sources, GROUP, F1, LAST, CONSTRAINED, MASKED
                    )
                    keep, at, above, equal = places(key, threshold, wanted_equal, above, equal)
                    _emit(item, keep, at, key, row, place, request, sources, outputs, F1, LAST, CONSTRAINED)
        if last:
            fill(request[1] + kept, request[1] + width, outputs, LAST, SUB)
