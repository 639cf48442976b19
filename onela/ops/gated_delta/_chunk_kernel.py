# mypy: disable-error-code="no-untyped-def"
"""The recurrence over packed prompts in two launches: what a chunk of 64 tokens knows of itself, then chunk by chunk.

With `G` the running sum of the log decays of a chunk, the first launch inverts `I + A`, where
`A_ij = beta_i (k_i . k_j) exp(G_i - G_j)` for j < i, and leaves `u = (I + A)^-1 beta v`,
`w = (I + A)^-1 beta exp(G) k` and `P_ij = (q_i . k_j) exp(G_i - G_j)` for j <= i. The second walks over a sequence's
chunks with the state `S` on chip:

    delta = u - w S        o = exp(G) q S + P delta        S <- exp(G_last) S + k^T exp(G_last - G) delta
"""

import triton
import triton.language as tl

from onela.ops.gated_delta._prefill_kernel import load_chunk, write_tail


@triton.jit
def _eye(o_i):
    return tl.where(o_i[:, None] == o_i[None, :], 1.0, 0.0)


@triton.jit
def _invert(b_A, o_i, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """`(I + A)^-1` of a strictly lower triangular [CHUNK, CHUNK] fp32.

    The diagonal blocks are inverted row by row, all at once; with `D` the block diagonal of their inverses and
    `N = D L`, `L` the blocks below the diagonal, the whole is `(I - N)(I + N^2) D`: four blocks in a row, `N^4 = 0`.
    """
    NUM: tl.constexpr = CHUNK // BLOCK
    tl.static_assert(NUM == 4)
    same = (o_i // BLOCK)[:, None] == (o_i // BLOCK)[None, :]
    b_inside = tl.where(same, b_A, 0.0)
    b_below = b_A - b_inside
    # [block, row, column]: of every row the block that lies on the diagonal.
    b_D = tl.sum(b_inside.reshape(NUM, BLOCK, NUM, BLOCK), 2)
    o_b = tl.arange(0, BLOCK)
    b_X = -b_D
    for i in range(2, BLOCK):
        # Row i of the inverse, less the unit: -A_i + (-A_i) X, over the rows above it.
        is_row = (o_b == i)[None, :, None]
        b_row = tl.sum(tl.where(is_row, -b_D, 0.0), 1)
        b_row += tl.sum(b_row[:, :, None] * b_X, 1)
        b_X = tl.where(is_row, b_row[:, None, :], b_X)
    b_X += _eye(o_b)[None, :, :]
    # Back to [CHUNK, CHUNK], zeros off the diagonal blocks.
    b_X = tl.broadcast_to(b_X[:, :, None, :], NUM, BLOCK, NUM, BLOCK).reshape(CHUNK, CHUNK)
    b_X = tl.where(same, b_X, 0.0)
    b_N = tl.dot(b_X, b_below, input_precision="tf32")
    b_N2 = tl.dot(b_N, b_N, input_precision="tf32")
    b_M = _eye(o_i) - b_N
    b_M += tl.dot(b_M, b_N2, input_precision="tf32")
    return tl.dot(b_M, b_X, input_precision="tf32")


@triton.jit
def chunk_prepare_kernel(
    p_q, p_k, p_v, p_g, p_beta, p_w, p_u, p_p, p_cu_seqlens, p_chunks, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One value head of one chunk."""
    i_hv = tl.program_id(0)
    _, i_t, bos, T = load_chunk(p_chunks, p_cu_seqlens, tl.program_id(1).to(tl.int64))
    if i_t * CHUNK >= T:
        return
    i_h = i_hv // (HV // H)
    o_i = tl.arange(0, CHUNK)
    o_t = i_t * CHUNK + o_i
    m_t = o_t < T
    o_k = tl.arange(0, K)
    o_rows = bos + o_t
    b_k = tl.load(p_k + ((o_rows * H + i_h) * K)[:, None] + o_k[None, :], mask=m_t[:, None], other=0.0)
    b_g = tl.load(p_g + o_rows * HV + i_hv, mask=m_t, other=0.0)
    b_beta = tl.load(p_beta + o_rows * HV + i_hv, mask=m_t, other=0.0)
    m_lower = (o_i[:, None] >= o_i[None, :]) & m_t[:, None]
    b_decay = tl.exp2(tl.where(m_lower, b_g[:, None] - b_g[None, :], float("-inf")))
    b_A = tl.dot(b_k, tl.trans(b_k)) * b_decay * b_beta[:, None]
    b_A = tl.where(o_i[:, None] > o_i[None, :], b_A, 0.0)
    b_X = _invert(b_A, o_i, CHUNK, BLOCK).to(p_k.dtype.element_ty)
    b_wide = b_k.to(tl.float32) * (b_beta * tl.exp2(b_g))[:, None]
    b_w = tl.dot(b_X, b_wide.to(p_k.dtype.element_ty))
    o_head = (o_rows * HV + i_hv)[:, None]
    tl.store(p_w + o_head * K + o_k[None, :], b_w.to(p_w.dtype.element_ty), mask=m_t[:, None])
    for i_v in tl.static_range(V // BLOCK_V):
        o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
        b_v = tl.load(p_v + o_head * V + o_v[None, :], mask=m_t[:, None], other=0.0)
        b_u = tl.dot(b_X, (b_v.to(tl.float32) * b_beta[:, None]).to(p_k.dtype.element_ty))
        tl.store(p_u + o_head * V + o_v[None, :], b_u.to(p_u.dtype.element_ty), mask=m_t[:, None])
    b_q = tl.load(p_q + ((o_rows * H + i_h) * K)[:, None] + o_k[None, :], mask=m_t[:, None], other=0.0)
    b_p = tl.dot(b_q, tl.trans(b_k)) * b_decay * scale
    tl.store(p_p + o_head * CHUNK + o_i[None, :], b_p.to(p_p.dtype.element_ty), mask=m_t[:, None])


@triton.jit
def chunk_scan_kernel(
    p_q, p_k, p_w, p_u, p_p, p_g, p_o, p_states, p_x, p_conv_state, p_cu_seqlens, p_prompts, p_cached_lens, s_x, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_V: tl.constexpr,
    KERNEL: tl.constexpr, SPLIT: tl.constexpr, CACHED: tl.constexpr,
):  # fmt: skip
    """Some value columns of one head of one sequence; the first of them also keeps the head's convolution tails."""
    i_v = tl.program_id(0)
    i_n = (tl.program_id(1) // HV).to(tl.int64)
    i_hv = tl.program_id(1) % HV
    i_h = i_hv // (HV // H)
    i_place = tl.load(p_prompts + i_n).to(tl.int64)
    bos = tl.load(p_cu_seqlens + i_n).to(tl.int64)
    T = (tl.load(p_cu_seqlens + i_n + 1).to(tl.int64) - bos).to(tl.int32)
    if T <= 0:
        return
    o_i = tl.arange(0, CHUNK)
    o_k = tl.arange(0, K)
    o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    # States lie [V, K].
    o_state = o_v[None, :] * K + o_k[:, None]
    if SPLIT:
        p_head = p_states + (i_place * HV + i_hv) * (2 * V * K)
    else:
        p_head = p_states + (i_place * HV + i_hv) * (V * K)
    b_S = tl.zeros([K, BLOCK_V], tl.float32)
    if CACHED:
        m_state = (o_state >= 0) & (i_place >= 0) & (tl.load(p_cached_lens + i_n) > 0)
        b_S = tl.load(p_head + o_state, mask=m_state, other=0.0).to(tl.float32)
        if SPLIT:
            b_S += tl.load(p_head + V * K + o_state, mask=m_state, other=0.0).to(tl.float32)
    dtype = p_k.dtype.element_ty
    p_q += (bos * H + i_h) * K
    p_k += (bos * H + i_h) * K
    p_w += (bos * HV + i_hv) * K
    p_u += (bos * HV + i_hv) * V
    p_o += (bos * HV + i_hv) * V
    p_p += (bos * HV + i_hv) * CHUNK
    p_g += bos * HV + i_hv
    for start in range(0, T, CHUNK):
        o_t = start + o_i
        m_t = (o_t < T)[:, None]
        o_qk = (o_t * (H * K))[:, None] + o_k[None, :]
        b_w = tl.load(p_w + (o_t * (HV * K))[:, None] + o_k[None, :], mask=m_t, other=0.0)
        b_q = tl.load(p_q + o_qk, mask=m_t, other=0.0)
        b_k = tl.load(p_k + o_qk, mask=m_t, other=0.0)
        b_u = tl.load(p_u + (o_t * (HV * V))[:, None] + o_v[None, :], mask=m_t, other=0.0)
        b_p = tl.load(p_p + (o_t * (HV * CHUNK))[:, None] + o_i[None, :], mask=m_t, other=0.0)
        b_g = tl.load(p_g + o_t * HV, mask=o_t < T, other=0.0)
        b_last = tl.load(p_g + (tl.minimum(start + CHUNK, T) - 1) * HV)
        b_half = b_S.to(dtype)
        b_d = b_u.to(tl.float32) - tl.dot(b_w, b_half)
        b_o = tl.dot(b_q, b_half) * (tl.exp2(b_g) * scale)[:, None]
        b_o = tl.dot(b_p, b_d.to(dtype), b_o)
        tl.store(p_o + (o_t * (HV * V))[:, None] + o_v[None, :], b_o.to(p_o.dtype.element_ty), mask=m_t)
        b_d *= tl.where(o_t < T, tl.exp2(b_last - b_g), 0.0)[:, None]
        b_S = tl.dot(tl.trans(b_k), b_d.to(dtype), b_S * tl.exp2(b_last))
    if i_place < 0:
        return
    if SPLIT:
        b_high = b_S.to(p_states.dtype.element_ty)
        tl.store(p_head + o_state, b_high)
        tl.store(p_head + V * K + o_state, (b_S - b_high.to(tl.float32)).to(p_states.dtype.element_ty))
    else:
        tl.store(p_head + o_state, b_S.to(p_states.dtype.element_ty))
    if i_v == 0:
        C: tl.constexpr = 2 * H * K + HV * V
        eos = bos + T
        has_past = i_place >= 0
        if CACHED:
            has_past = tl.load(p_cached_lens + i_n) > 0
        o_c = tl.arange(0, V)
        write_tail(
            p_x, p_conv_state, i_place, bos, eos, has_past, 2 * H * K + i_hv * V + o_c, o_c >= 0, s_x, C, KERNEL, CACHED
        )  # fmt: skip
        if i_hv % (HV // H) == 0:
            write_tail(
                p_x, p_conv_state, i_place, bos, eos, has_past, i_h * K + o_k, o_k >= 0, s_x, C, KERNEL, CACHED
            )  # fmt: skip
            write_tail(
                p_x, p_conv_state, i_place, bos, eos, has_past, (H + i_h) * K + o_k, o_k >= 0, s_x, C, KERNEL, CACHED
            )  # fmt: skip
