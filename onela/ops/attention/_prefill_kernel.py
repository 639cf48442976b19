# mypy: disable-error-code="no-untyped-def"
"""Keys and values of packed prompts into their pages, and attention over those, or of last rows alone."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def write_pages_kernel(
    p_k, p_v, p_k_cache, p_v_cache, p_page_rows, num_rows, s_k, s_v,
    SIZE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rows of `SIZE` numbers, all heads of a token."""
    o_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_d = tl.arange(0, BLOCK_D)
    i_row = tl.load(p_page_rows + o_r, mask=o_r < num_rows, other=-1).to(tl.int64)
    mask = (i_row >= 0)[:, None] & (o_d < SIZE)[None, :]
    p_cached = (i_row * SIZE)[:, None] + o_d[None, :]
    b_k = tl.load(p_k + (o_r * s_k)[:, None] + o_d[None, :], mask=mask, other=0.0)
    tl.store(p_k_cache + p_cached, b_k.to(p_k_cache.dtype.element_ty), mask=mask)
    b_v = tl.load(p_v + (o_r * s_v)[:, None] + o_d[None, :], mask=mask, other=0.0)
    tl.store(p_v_cache + p_cached, b_v.to(p_v_cache.dtype.element_ty), mask=mask)


@triton.jit
def _attend(b_q, b_k, b_v, seen, b_o, b_m, b_l, scale_log2, MASKED: tl.constexpr, UPCAST: tl.constexpr):
    """One block of keys of the online softmax; `seen` says which row sees which key."""
    if UPCAST:
        b_q = b_q.to(tl.float32)
        b_k = b_k.to(tl.float32)
        b_v = b_v.to(tl.float32)
    b_s = tl.dot(b_q, tl.trans(b_k)) * scale_log2
    if MASKED:
        b_s = tl.where(seen, b_s, float("-inf"))
    # Finite, so that a row that has seen nothing yet needs no special case.
    b_new = tl.maximum(b_m, tl.max(b_s, 1))
    b_p = tl.exp2(b_s - b_new[:, None])
    b_alpha = tl.exp2(b_m - b_new)
    b_l = b_l * b_alpha + tl.sum(b_p, 1)
    b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o * b_alpha[:, None])
    return b_o, b_new, b_l


@triton.jit
def _rows_of(p_table, start, o_j, highest, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the tokens of a block lie within the cache; those past `highest` anywhere in it.

    A prompt that has ended meanwhile has no pages any more: what is read for it means nothing, but lies in the cache.
    """
    if PAGE % BLOCK_N == 0:
        page = tl.maximum(tl.load(p_table + start // PAGE), 0)
        rows = page.to(tl.int64) * PAGE + start % PAGE + o_j
    else:
        place = tl.minimum(start + o_j, highest)
        page = tl.maximum(tl.load(p_table + place // PAGE), 0)
        rows = page.to(tl.int64) * PAGE + place % PAGE
    return rows


@triton.jit
def pages_attention_kernel(
    p_q, p_k_cache, p_v_cache, p_page_table, p_prompts, p_cached_lens, p_cu_seqlens, p_o, p_part_o, p_part_m, p_part_l,
    s_q, s_table, scale_log2, num_sequences,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, LAST: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Rows (new token, head of the group) of one sequence and key head over a part of the keys in its pages."""
    i_t = tl.program_id(0)
    i_h = tl.program_id(1)
    i_s = tl.program_id(2)
    o_s = tl.arange(0, BLOCK_S)
    low = tl.load(p_cu_seqlens + o_s, mask=o_s < num_sequences, other=0)
    news = tl.load(p_cu_seqlens + o_s + 1, mask=o_s < num_sequences, other=0) - low
    asked = tl.minimum(news, 1) if LAST else news
    tiles = (asked * G + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, 0)
    i_n = tl.sum((ends <= i_t).to(tl.int32), 0)
    if i_n < num_sequences:
        mine = o_s == i_n
        row0 = tl.sum(tl.where(mine, low, 0), 0)
        new = tl.sum(tl.where(mine, news, 0), 0)
        count = tl.sum(tl.where(mine, asked, 0), 0)
        first_m = (i_t - tl.sum(tl.where(mine, ends - tiles, 0), 0)) * BLOCK_M
        prompt = tl.load(p_prompts + i_n).to(tl.int64)
        served = prompt >= 0
        # The position of the first token that asks, and those of this tile's first and last one.
        begin = tl.load(p_cached_lens + i_n) + new - count
        lowest = begin + first_m // G
        highest = begin + tl.minimum(first_m + BLOCK_M - 1, count * G - 1) // G
        o_m = first_m + tl.arange(0, BLOCK_M)
        o_d = tl.arange(0, BLOCK_D)
        o_j = tl.arange(0, BLOCK_N)
        m_m = o_m < count * G
        m_d = (o_d < D)[None, :]
        token = (i_n if LAST else row0) + o_m // G
        head = i_h * G + o_m % G
        p_row = p_q + token.to(tl.int64)[:, None] * s_q + head[:, None] * D + o_d[None, :]
        b_q = tl.load(p_row, mask=m_m[:, None] & m_d, other=0.0)
        b_o = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        b_m = tl.full([BLOCK_M], -1.0e30, tl.float32)
        b_l = tl.zeros([BLOCK_M], tl.float32)
        blocks = tl.where(served, highest // BLOCK_N + 1, 0)
        first = blocks * i_s // SPLITS
        last = blocks * (i_s + 1) // SPLITS
        # Blocks that every row of the tile sees whole.
        whole = tl.minimum((lowest + 1) // BLOCK_N, last)
        p_table = p_page_table + prompt * s_table
        for block in range(first, whole):
            o_n = _rows_of(p_table, block * BLOCK_N, o_j, highest, PAGE, BLOCK_N)
            at = (o_n[:, None] * HKV + i_h) * D + o_d[None, :]
            b_k = tl.load(p_k_cache + at, mask=m_d, other=0.0)
            b_v = tl.load(p_v_cache + at, mask=m_d, other=0.0)
            b_o, b_m, b_l = _attend(b_q, b_k, b_v, None, b_o, b_m, b_l, scale_log2, False, UPCAST)
        for block in range(tl.maximum(first, whole), last):
            o_n = _rows_of(p_table, block * BLOCK_N, o_j, highest, PAGE, BLOCK_N)
            place = block * BLOCK_N + o_j
            at = (o_n[:, None] * HKV + i_h) * D + o_d[None, :]
            # What lies behind the prompt's end may be anything, NaN too.
            m_n = (place <= highest)[:, None] & m_d
            b_k = tl.load(p_k_cache + at, mask=m_n, other=0.0)
            b_v = tl.load(p_v_cache + at, mask=m_n, other=0.0)
            seen = place[None, :] <= (begin + o_m // G)[:, None]
            b_o, b_m, b_l = _attend(b_q, b_k, b_v, seen, b_o, b_m, b_l, scale_log2, True, UPCAST)
        i_row = token.to(tl.int64) * (HKV * G) + head
        if SPLITS == 1:
            b_o = b_o / tl.where(b_l == 0.0, 1.0, b_l)[:, None]
            tl.store(
                p_o + i_row[:, None] * D + o_d[None, :], b_o.to(p_o.dtype.element_ty), mask=m_m[:, None] & m_d
            )
        else:
            i_part = i_row * SPLITS + i_s
            tl.store(p_part_m + i_part, b_m, mask=m_m)
            tl.store(p_part_l + i_part, b_l, mask=m_m)
            tl.store(p_part_o + i_part[:, None] * D + o_d[None, :], b_o, mask=m_m[:, None] & m_d)


@triton.jit
def last_row_kernel(
    p_q, p_k, p_v, p_cu_seqlens, p_part_o, p_part_m, p_part_l, s_q, s_k, s_v, scale_log2,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One row of queries over a part of its sequence's keys, for the query heads of one key head."""
    i_split = tl.program_id(0)
    i_n = tl.program_id(1).to(tl.int64)
    i_h = tl.program_id(2)
    begin = tl.load(p_cu_seqlens + i_n * STEP).to(tl.int64)
    length = (tl.load(p_cu_seqlens + i_n * STEP + 1).to(tl.int64) - begin).to(tl.int32)
    part = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_N) * BLOCK_N
    first = i_split * part
    end = tl.minimum(first + part, length)
    o_g = tl.arange(0, BLOCK_G)
    o_j = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    m_d = (o_d < D)[None, :]
    i_row = (i_n * HKV + i_h) * G + o_g
    m_g = o_g < G
    p_row = p_q + i_n * s_q + (i_h * G + o_g)[:, None] * D + o_d[None, :]
    b_q = tl.load(p_row, mask=m_g[:, None] & m_d, other=0.0)
    p_k += begin * s_k + i_h * D
    p_v += begin * s_v + i_h * D
    b_m = tl.full([BLOCK_G], float("-inf"), tl.float32)
    b_l = tl.zeros([BLOCK_G], tl.float32)
    b_o = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(first, end, BLOCK_N):
        o_n = (start + o_j).to(tl.int64)
        m_n = o_n < end
        b_k = tl.load(p_k + (o_n * s_k)[:, None] + o_d[None, :], mask=m_n[:, None] & m_d, other=0.0)
        b_v = tl.load(p_v + (o_n * s_v)[:, None] + o_d[None, :], mask=m_n[:, None] & m_d, other=0.0)
        if UPCAST:
            b_s = tl.dot(b_q.to(tl.float32), tl.trans(b_k).to(tl.float32)) * scale_log2
        else:
            b_s = tl.dot(b_q, tl.trans(b_k)) * scale_log2
        b_s = tl.where(m_n[None, :], b_s, float("-inf"))
        b_new = tl.maximum(b_m, tl.max(b_s, 1))
        b_p = tl.exp2(b_s - b_new[:, None])
        b_alpha = tl.exp2(b_m - b_new)
        b_l = b_l * b_alpha + tl.sum(b_p, 1)
        if UPCAST:
            b_o = b_o * b_alpha[:, None] + tl.dot(b_p, b_v.to(tl.float32))
        else:
            b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o * b_alpha[:, None])
        b_m = b_new
    i_part = i_row * SPLITS + i_split
    tl.store(p_part_m + i_part, b_m, mask=m_g)
    tl.store(p_part_l + i_part, b_l, mask=m_g)
    tl.store(p_part_o + (i_part * D)[:, None] + o_d[None, :], b_o, mask=m_g[:, None] & m_d)


@triton.jit
def merge_parts_kernel(
    p_part_o, p_part_m, p_part_l, p_o, D: tl.constexpr, SPLITS: tl.constexpr, BLOCK_D: tl.constexpr
):
    """The parts of one row and head put together; zeros for a row without keys."""
    i_row = tl.program_id(0).to(tl.int64)
    o_s = tl.arange(0, SPLITS)
    o_d = tl.arange(0, BLOCK_D)
    b_m = tl.load(p_part_m + i_row * SPLITS + o_s)
    b_l = tl.load(p_part_l + i_row * SPLITS + o_s)
    highest = tl.max(b_m, 0)
    b_w = tl.exp2(b_m - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(b_w * b_l, 0)
    p_part = p_part_o + ((i_row * SPLITS + o_s) * D)[:, None] + o_d[None, :]
    m_part = (b_l > 0.0)[:, None] & (o_d < D)[None, :]
    b_o = tl.sum(tl.load(p_part, mask=m_part, other=0.0) * b_w[:, None], 0)
    b_o = b_o / tl.where(total == 0.0, 1.0, total)
    tl.store(p_o + i_row * D + o_d, b_o.to(p_o.dtype.element_ty), mask=o_d < D)
