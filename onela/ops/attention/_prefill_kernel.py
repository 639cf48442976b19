# mypy: disable-error-code="no-untyped-def"
"""Keys and values of packed prompts into their pages, and out of them into packed rows."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def write_pages_kernel(
    p_k, p_v, p_k_cache, p_v_cache, p_page_rows, p_v_packed, num_rows, s_k, s_v,
    SIZE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """Rows of `SIZE` numbers, all heads of a token; with PACK the values also go to rows that adjoin."""
    o_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_d = tl.arange(0, BLOCK_D)
    m_r = o_r < num_rows
    i_row = tl.load(p_page_rows + o_r, mask=m_r, other=-1).to(tl.int64)
    m_d = (o_d < SIZE)[None, :]
    m_kept = (i_row >= 0)[:, None] & m_d
    p_cached = (i_row * SIZE)[:, None] + o_d[None, :]
    b_k = tl.load(p_k + (o_r * s_k)[:, None] + o_d[None, :], mask=m_kept, other=0.0)
    tl.store(p_k_cache + p_cached, b_k.to(p_k_cache.dtype.element_ty), mask=m_kept)
    b_v = tl.load(p_v + (o_r * s_v)[:, None] + o_d[None, :], mask=m_r[:, None] & m_d, other=0.0)
    tl.store(p_v_cache + p_cached, b_v.to(p_v_cache.dtype.element_ty), mask=m_kept)
    if PACK:
        tl.store(p_v_packed + (o_r * SIZE)[:, None] + o_d[None, :], b_v, mask=m_r[:, None] & m_d)


@triton.jit
def gather_pages_kernel(
    p_k_cache, p_v_cache, p_key_pages, p_k, p_v,
    PAGE: tl.constexpr, SIZE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A part of one piece of the keys: rows of a page, or zeros."""
    p_piece = p_key_pages + tl.program_id(0).to(tl.int64) * 3
    i_page = tl.load(p_piece).to(tl.int64)
    i_row = tl.load(p_piece + 1).to(tl.int64)
    count = tl.load(p_piece + 2)
    o_r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_d = tl.arange(0, BLOCK_D)
    mask = (o_r < count)[:, None] & (o_d < SIZE)[None, :]
    p_cached = ((i_page * PAGE + o_r) * SIZE)[:, None] + o_d[None, :]
    p_packed = ((i_row + o_r) * SIZE)[:, None] + o_d[None, :]
    m_kept = mask & (i_page >= 0)
    tl.store(p_k + p_packed, tl.load(p_k_cache + p_cached, mask=m_kept, other=0.0), mask=mask)
    tl.store(p_v + p_packed, tl.load(p_v_cache + p_cached, mask=m_kept, other=0.0), mask=mask)


@triton.jit
def last_row_kernel(
    p_q, p_k, p_v, p_cu_keys, p_part_o, p_part_m, p_part_l, s_k, s_v, scale_log2,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One row of queries over a part of its sequence's keys, for the query heads of one key head."""
    i_split = tl.program_id(0)
    i_n = tl.program_id(1).to(tl.int64)
    i_h = tl.program_id(2)
    begin = tl.load(p_cu_keys + i_n * STEP).to(tl.int64)
    length = (tl.load(p_cu_keys + i_n * STEP + 1).to(tl.int64) - begin).to(tl.int32)
    part = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_N) * BLOCK_N
    first = i_split * part
    end = tl.minimum(first + part, length)
    o_g = tl.arange(0, BLOCK_G)
    o_j = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    m_d = (o_d < D)[None, :]
    i_row = (i_n * HKV + i_h) * G + o_g
    m_g = o_g < G
    b_q = tl.load(p_q + (i_row * D)[:, None] + o_d[None, :], mask=m_g[:, None] & m_d, other=0.0)
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
    b_o = tl.sum(tl.load(p_part, mask=(o_d < D)[None, :], other=0.0) * b_w[:, None], 0)
    b_o = b_o / tl.where(total == 0.0, 1.0, total)
    tl.store(p_o + i_row * D + o_d, b_o.to(p_o.dtype.element_ty), mask=o_d < D)
