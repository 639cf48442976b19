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
