"""One level of a selection: of the items below what the level before kept, the best W of each request."""

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
def _locate(i, valid, request, sources, F, F12, CONSTRAINED: tl.constexpr):
    """Last level: item -> (row, code, child node, whether it exists)."""
    parent = tl.load(sources[1] + request[1] + i // F, mask=valid, other=-1)
    valid = valid & (parent >= 0)
    row = (parent // F12).to(tl.int64)
    place = (parent % F12) * F + i % F
    if CONSTRAINED:
        child = tl.load(sources[6] + row, mask=valid, other=0) + place
        valid = valid & (place < tl.load(sources[7] + row, mask=valid, other=0))
        code = tl.load(sources[8] + child, mask=valid, other=0).to(tl.int32)
    else:
        child = tl.zeros_like(row)
        code = place
    return row, code, child, valid & (code < sources[9])


@triton.jit
def _item_keys(i, n, request, sources, F, F12, LEVEL: tl.constexpr, CONSTRAINED: tl.constexpr):
    """Keys of the items `i` of a request, NO_KEY where there is none."""
    valid = i < n
    if LEVEL == 1:
        key = tl.load(sources[0] + request[0] * F + i, mask=valid, other=NO_KEY)
    elif LEVEL == 2:
        parent = tl.load(sources[1] + request[1] + i // F, mask=valid, other=-1)
        key = tl.load(sources[0] + parent.to(tl.int64) * F + i % F, mask=parent >= 0, other=NO_KEY)
    else:
        row, code, _, valid = _locate(i, valid, request, sources, F, F12, CONSTRAINED)
        x = tl.load(sources[2] + row * sources[3] + code, mask=valid, other=-float("inf")).to(tl.float32)
        cum = tl.load(sources[4] + row, mask=valid, other=-float("inf"))
        log_normalizer = tl.load(sources[5] + row, mask=valid, other=0.0)
        key = tl.where(valid, to_key(cum + (x - log_normalizer)), NO_KEY)
    return key


@triton.jit
def _merged(j, n, per_segment, p_kept_keys, CAP: tl.constexpr):
    """The keys that a request's segments kept, in order, and their places; from the second-level cache."""
    place = (j // per_segment) * CAP + j % per_segment
    return tl.load(p_kept_keys + place, mask=j < n, other=NO_KEY, cache_modifier=".cg"), place


@triton.jit
def _emit(
    i, keep, at, key, request, sources, outputs, F, F12, LEVEL: tl.constexpr, CONSTRAINED: tl.constexpr
):
    """Write the kept items `i` to their places `at` of the request's output."""
    at = request[1] + at
    if LEVEL == 1:
        tl.store(outputs[0] + at, (request[0] * F + i).to(tl.int32), mask=keep)
    elif LEVEL == 2:
        parent = tl.load(sources[1] + request[1] + i // F, mask=keep, other=0)
        tl.store(outputs[0] + at, parent * F + i % F, mask=keep)
    else:
        row, code, child, keep = _locate(i, keep, request, sources, F, F12, CONSTRAINED)
        tl.store(outputs[0] + at, row.to(tl.int32), mask=keep)
        tl.store(outputs[1] + at, code, mask=keep)
        tl.store(outputs[2] + at, to_score(key), mask=keep)
        tl.store(outputs[3] + at, child, mask=keep)


@triton.jit
def _fill(start, end, outputs, LEVEL: tl.constexpr, SUB: tl.constexpr):
    """PAD from `start` up to `end`."""
    for block in range(start, end, SUB):
        at = block + tl.arange(0, SUB)
        tl.store(outputs[0] + at, tl.full([SUB], -1, tl.int32), mask=at < end)
        if LEVEL == 3:
            tl.store(outputs[1] + at, tl.full([SUB], -1, tl.int32), mask=at < end)
            tl.store(outputs[2] + at, tl.full([SUB], -float("inf"), tl.float32), mask=at < end)
            tl.store(outputs[3] + at, tl.full([SUB], -1, tl.int64), mask=at < end)


@triton.jit
def _bracket(low, high, legal, width):
    """Start of a search between the least and the largest key: [low, high) holds the threshold."""
    want = tl.minimum(width, legal)
    return tl.where(want == legal, low, high) + (want > 0).to(tl.int32), want


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
def _narrow(low, high, count_low, count_high, cut, count, want):
    """Keep the side that holds the largest threshold that `want` keys reach; an exact hit ends the search."""
    up = count >= want
    high = tl.where(count > want, high, tl.where(count == want, cut + 1, cut))
    return tl.where(up, cut, low), high, tl.where(up, count, count_low), tl.where(up, count_high, count)


@triton.jit
def _threshold(key, width):
    """The `width`-th largest of keys in registers, how many equal to it are wanted, and how many in all."""
    low = tl.min(tl.where(key > NO_KEY, key, LARGEST_KEY), 0)
    count_low = tl.sum((key > NO_KEY).to(tl.int32), 0)
    count_high = count_low * 0
    high, want = _bracket(low, tl.max(key, 0), count_low, width)
    turn = 0
    while low + 1 < high:
        cut = _guess(low, high, count_low, count_high, want, turn)
        count = tl.sum((key >= cut).to(tl.int32), 0)
        low, high, count_low, count_high = _narrow(low, high, count_low, count_high, cut, count, want)
        turn += 1
    return low, want - tl.sum((key > low).to(tl.int32), 0), want


@triton.jit
def _threshold_in_memory(n, width, per_segment, p_kept_keys, CAP: tl.constexpr, SUB: tl.constexpr):
    """The same over more keys than registers hold: correct at any size, and slow."""
    o_j = tl.arange(0, SUB)
    count_low = 0
    low = LARGEST_KEY
    high = NO_KEY
    for block in range(0, n, SUB):
        key, _ = _merged(block + o_j, n, per_segment, p_kept_keys, CAP)
        count_low += tl.sum((key > NO_KEY).to(tl.int32), 0)
        low = tl.minimum(low, tl.min(tl.where(key > NO_KEY, key, LARGEST_KEY), 0))
        high = tl.maximum(high, tl.max(key, 0))
    count_high = count_low * 0
    high, want = _bracket(low, high, count_low, width)
    turn = 0
    while low + 1 < high:
        cut = _guess(low, high, count_low, count_high, want, turn)
        count = 0
        for block in range(0, n, SUB):
            key, _ = _merged(block + o_j, n, per_segment, p_kept_keys, CAP)
            count += tl.sum((key >= cut).to(tl.int32), 0)
        low, high, count_low, count_high = _narrow(low, high, count_low, count_high, cut, count, want)
        turn += 1
    above = 0
    for block in range(0, n, SUB):
        key, _ = _merged(block + o_j, n, per_segment, p_kept_keys, CAP)
        above += tl.sum((key > low).to(tl.int32), 0)
    return low, want - above, want


@triton.jit
def _places(key, threshold, wanted_equal, above_before, equal_before):
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
def beam_select_level_kernel(
    p_cu_rows,
    p_cu_out,
    p_keys,
    p_selected,
    p_logits,
    stride_logits,
    p_cum,
    p_lognorm,
    p_first,
    p_count,
    p_codes,
    p_kept_keys,
    p_kept_items,
    p_done,
    p_out,
    p_out_codes,
    p_out_scores,
    p_out_nodes,
    num_out,
    B,
    C,
    F: tl.constexpr,
    F12: tl.constexpr,
    LEVEL: tl.constexpr,
    CONSTRAINED: tl.constexpr,
    CAP: tl.constexpr,
    SUB: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """One program per segment of CAP items of a request; compaction by blocks of SUB keeps registers free."""
    i_p = tl.program_id(0)
    o_b = tl.arange(0, BLOCK_B)
    rows_low = tl.load(p_cu_rows + o_b, mask=o_b < B, other=0)
    rows_high = tl.load(p_cu_rows + o_b + 1, mask=o_b < B, other=0)
    widths = tl.load(p_cu_out + o_b + 1, mask=o_b < B, other=0) - tl.load(
        p_cu_out + o_b, mask=o_b < B, other=0
    )
    if LEVEL == 1:
        items = (rows_high - rows_low) * F
    else:
        items = widths * F
    segments = tl.where(widths > 0, tl.maximum((items + CAP - 1) // CAP, 1), 0)
    ends = tl.cumsum(segments, 0)
    r = tl.sum((ends <= i_p).to(tl.int32), 0)
    outputs = (p_out, p_out_codes, p_out_scores, p_out_nodes)
    if LEVEL == 3:  # noqa: SIM102 (known when compiled)
        if i_p == 0:
            _fill(tl.load(p_cu_out + B), num_out, outputs, LEVEL, SUB)
    if r < B:
        num_segments = tl.sum(tl.where(o_b == r, segments, 0), 0)
        i_s = i_p - tl.sum(tl.where(o_b == r, ends - segments, 0), 0)
        n = tl.sum(tl.where(o_b == r, items, 0), 0)
        width = tl.sum(tl.where(o_b == r, widths, 0), 0)
        request = (tl.load(p_cu_rows + r).to(tl.int64), tl.load(p_cu_out + r).to(tl.int64))
        sources = (
            p_keys,
            p_selected,
            p_logits,
            stride_logits,
            p_cum,
            p_lognorm,
            p_first,
            p_count,
            p_codes,
            C,
        )
        base = (request[0] if LEVEL == 1 else request[1]) * F + r * CAP
        p_kept_keys += base
        p_kept_items += base

        key = _item_keys(i_s * CAP + tl.arange(0, CAP), n, request, sources, F, F12, LEVEL, CONSTRAINED)
        threshold, wanted_equal, kept = _threshold(key, width)
        above = 0
        equal = 0
        for block in range(0, CAP, SUB):
            o_i = i_s * CAP + block + tl.arange(0, SUB)
            if SUB < CAP:
                part = _item_keys(o_i, n, request, sources, F, F12, LEVEL, CONSTRAINED)
            else:
                part = key
            keep, at, above, equal = _places(part, threshold, wanted_equal, above, equal)
            if num_segments == 1:
                _emit(o_i, keep, at, part, request, sources, outputs, F, F12, LEVEL, CONSTRAINED)
            else:
                tl.store(p_kept_keys + i_s * CAP + at, part, mask=keep)
                tl.store(p_kept_items + i_s * CAP + at, o_i, mask=keep)
        last = num_segments == 1
        if num_segments > 1:
            # A segment owns the first min(width, CAP) of its CAP places, and leaves NO_KEY in
            # those it does not need.
            per_segment = tl.minimum(width, CAP)
            for block in range(kept, per_segment, SUB):
                o_hole = block + tl.arange(0, SUB)
                no_keys = tl.full([SUB], NO_KEY, tl.int32)
                tl.store(p_kept_keys + i_s * CAP + o_hole, no_keys, mask=o_hole < per_segment)
            # All stores of a program come before its arrival; the last to arrive sees those of
            # all the others.
            tl.debug_barrier()
            last = tl.atomic_add(p_done + r, 1, sem="acq_rel", scope="gpu") == num_segments - 1
            if last:
                tl.debug_barrier()
                n = num_segments * per_segment
                if n <= CAP:
                    key, _ = _merged(tl.arange(0, CAP), n, per_segment, p_kept_keys, CAP)
                    threshold, wanted_equal, kept = _threshold(key, width)
                else:
                    threshold, wanted_equal, kept = _threshold_in_memory(
                        n, width, per_segment, p_kept_keys, CAP, SUB
                    )
                above = 0
                equal = 0
                for block in range(0, n, SUB):
                    o_j = block + tl.arange(0, SUB)
                    part, place = _merged(o_j, n, per_segment, p_kept_keys, CAP)
                    item = tl.load(p_kept_items + place, mask=o_j < n, other=0, cache_modifier=".cg")
                    keep, at, above, equal = _places(part, threshold, wanted_equal, above, equal)
                    _emit(item, keep, at, part, request, sources, outputs, F, F12, LEVEL, CONSTRAINED)
        if last:
            _fill(request[1] + kept, request[1] + width, outputs, LEVEL, SUB)
