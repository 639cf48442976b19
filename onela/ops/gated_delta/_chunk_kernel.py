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
def _invert(b_A, o_i, LEVELS: tl.constexpr):
    """`(I + A)^-1` of a strictly lower triangular [2^LEVELS, 2^LEVELS] fp32.

    With `X` the inverses of the diagonal blocks of some size, and `L` what lies below the diagonal in blocks of twice
    that size, those have the inverses `X - X L X`: from blocks of one, in as many steps as there are doublings. Rows of
    any of them are products of contractions times beta <= 1, so that fp16 holds them as well as tf32 would.
    """
    b_X = tl.where(o_i[:, None] == o_i[None, :], 1.0, 0.0)
    b_X -= tl.where((o_i[:, None] ^ o_i[None, :]) == 1, b_A, 0.0)
    for level in tl.static_range(1, LEVELS):
        o_b = o_i >> level
        b_L = tl.where((o_b[:, None] ^ o_b[None, :]) == 1, b_A, 0.0).to(tl.float16)
        b_H = b_X.to(tl.float16)
        b_Y = tl.dot(b_H, b_L).to(tl.float16)
        b_X -= tl.dot(b_Y, b_H)
    return b_X


@triton.jit
def chunk_prepare_kernel(
    p_q, p_k, p_v, p_g, p_beta, p_w, p_u, p_p, p_cu_seqlens, p_chunks, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One value head of one chunk."""
    i_hv = tl.program_id(0)
    _, i_t, bos, T = load_chunk(p_chunks, p_cu_seqlens, tl.program_id(1).to(tl.int64))
    if i_t * CHUNK >= T:
        return
    i_h = i_hv // (HV // H)
    row = bos + i_t * CHUNK
    o_i = tl.arange(0, CHUNK)
    m_i = o_i < T - i_t * CHUNK
    m_t = m_i[:, None]
    o_k = tl.arange(0, K)
    o_qk = (o_i * (H * K))[:, None] + o_k[None, :]
    p_q += (row * H + i_h) * K
    p_k += (row * H + i_h) * K
    p_head = row * HV + i_hv
    b_k = tl.load(p_k + o_qk, mask=m_t, other=0.0)
    b_g = tl.load(p_g + p_head + o_i * HV, mask=m_i, other=0.0)
    b_beta = tl.load(p_beta + p_head + o_i * HV, mask=m_i, other=0.0)
    m_lower = (o_i[:, None] >= o_i[None, :]) & m_t
    b_decay = tl.exp2(tl.where(m_lower, b_g[:, None] - b_g[None, :], float("-inf")))
    b_q = tl.load(p_q + o_qk, mask=m_t, other=0.0)
    b_p = tl.dot(b_q, tl.trans(b_k)) * b_decay * scale
    tl.store(
        p_p + p_head * CHUNK + (o_i * (HV * CHUNK))[:, None] + o_i[None, :], b_p.to(p_p.dtype.element_ty), mask=m_t
    )  # fmt: skip
    b_A = tl.dot(b_k, tl.trans(b_k)) * b_decay * b_beta[:, None]
    b_A = tl.where(o_i[:, None] > o_i[None, :], b_A, 0.0)
    b_X = _invert(b_A, o_i, LEVELS).to(p_k.dtype.element_ty)
    b_wide = b_k.to(tl.float32) * (b_beta * tl.exp2(b_g))[:, None]
    b_w = tl.dot(b_X, b_wide.to(p_k.dtype.element_ty))
    tl.store(
        p_w + p_head * K + (o_i * (HV * K))[:, None] + o_k[None, :], b_w.to(p_w.dtype.element_ty), mask=m_t
    )  # fmt: skip
    for i_v in tl.static_range(V // BLOCK_V):
        o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
        o_u = (o_i * (HV * V))[:, None] + o_v[None, :]
        b_v = tl.load(p_v + p_head * V + o_u, mask=m_t, other=0.0)
        b_u = tl.dot(b_X, (b_v.to(tl.float32) * b_beta[:, None]).to(p_k.dtype.element_ty))
        tl.store(p_u + p_head * V + o_u, b_u.to(p_u.dtype.element_ty), mask=m_t)


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
