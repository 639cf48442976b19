# mypy: disable-error-code="no-untyped-def"
"""The portable Triton kernel of projection replay, and the pieces of it that the fused layer step shares.

A program owns one value head (or a block of its value columns) of one request, keeps the prompt's state in
shared memory and walks over tiles of the request's beams. A tile is multiplied with the state first; then both
projections are carried over the records, oldest first. Nothing is ever divided by a decay.
"""

import triton
import triton.language as tl


@triton.jit
def load_state(
    p_state,
    i_row,
    i_hv,
    o_k,
    o_v,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SPLIT_STATE: tl.constexpr,
):
    """A block of one head's state, transposed to [K, BLOCK_V], as two halves whose sum it is."""
    o_state = o_k[:, None] + o_v[None, :] * K
    if SPLIT_STATE:
        p_head = p_state + (i_row * HV + i_hv) * (2 * V * K)
        b_high = tl.load(p_head + o_state)
        # Without it both halves pass through registers at once, which spills.
        tl.debug_barrier()
        b_low = tl.load(p_head + V * K + o_state)
    else:
        b_state = tl.load(p_state + (i_row * HV + i_hv) * (V * K) + o_state)
        b_high = b_state.to(tl.bfloat16)
        b_low = (b_state - b_high.to(tl.float32)).to(tl.bfloat16)
    return b_high, b_low


@triton.jit
def project(b_xq, b_xk, b_high, b_low, UPCAST: tl.constexpr):
    """Both rows of every beam times the state [K, BLOCK_V], as fp32: bf16 rows meet both halves, wider ones their sum.

    One product of twice the rows, so that the state's operand is read once and never kept in registers.
    """
    b_x = tl.join(b_xq, b_xk).permute(0, 2, 1).reshape(2 * b_xq.shape[0], b_xq.shape[1])
    if UPCAST or b_xq.dtype != tl.bfloat16:
        b_state = b_high.to(tl.float32) + b_low.to(tl.float32)
        b_u = tl.dot(b_x.to(tl.float32), b_state, input_precision="ieee" if UPCAST else "tf32x3")
    else:
        b_u = tl.dot(b_x, b_low, tl.dot(b_x, b_high))
    return tl.split(b_u.reshape(b_xq.shape[0], 2, b_high.shape[1]).permute(0, 2, 1))


@triton.jit
def apply_record(
    i_slot,
    b_q,
    b_k,
    b_uq,
    b_uk,
    p_records_g,
    p_records_delta,
    p_records_k,
    i_h,
    i_hv,
    o_k,
    o_v,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
):
    """Carry both projections over one ancestor's transition; PAD changes nothing."""
    m_slot = i_slot >= 0
    i_slot = i_slot.to(tl.int64)
    b_key = tl.load(
        p_records_k + ((i_slot * H + i_h) * K)[:, None] + o_k[None, :], mask=m_slot[:, None], other=0.0
    )
    b_delta = tl.load(
        p_records_delta + ((i_slot * HV + i_hv) * V)[:, None] + o_v[None, :], mask=m_slot[:, None], other=0.0
    )
    b_alpha = tl.exp(tl.load(p_records_g + i_slot * HV + i_hv, mask=m_slot, other=0.0))
    b_key = b_key.to(tl.float32)
    b_delta = b_delta.to(tl.float32)
    b_uq = b_uq * b_alpha[:, None] + b_delta * tl.sum(b_key * b_q, 1)[:, None]
    b_uk = b_uk * b_alpha[:, None] + b_delta * tl.sum(b_key * b_k, 1)[:, None]
    return b_uq, b_uk


@triton.jit
def replay_rows(
    b_xq,
    b_xk,
    b_v,
    b_g,
    b_beta,
    b_high,
    b_low,
    b_ancestors,
    depth,
    p_records_g,
    p_records_delta,
    p_records_k,
    i_h,
    i_hv,
    o_k,
    o_v,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
    DEPTH_TILE: tl.constexpr,
    STAGES: tl.constexpr,
    UNROLL: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Replay a tile of beams: returns the output and the delta record, [BLOCK_W, BLOCK_V] fp32."""
    o_d = tl.arange(0, DEPTH_TILE)
    b_uq, b_uk = project(b_xq, b_xk, b_high, b_low, UPCAST)
    b_q = b_xq.to(tl.float32)
    b_k = b_xk.to(tl.float32)
    if UNROLL:
        for j in tl.static_range(MAX_DEPTH):
            i_slot = tl.max(tl.where((o_d == j)[None, :], b_ancestors, -1), 1)
            b_uq, b_uk = apply_record(
                i_slot, b_q, b_k, b_uq, b_uk, p_records_g, p_records_delta, p_records_k,
                i_h, i_hv, o_k, o_v, H, HV, K, V,
            )  # fmt: skip
    elif MAX_DEPTH > 0:
        for j in tl.range(0, depth, num_stages=STAGES):
            i_slot = tl.max(tl.where((o_d == j)[None, :], b_ancestors, -1), 1)
            b_uq, b_uk = apply_record(
                i_slot, b_q, b_k, b_uq, b_uk, p_records_g, p_records_delta, p_records_k,
                i_h, i_hv, o_k, o_v, H, HV, K, V,
            )  # fmt: skip
    b_q_scale = scale * tl.rsqrt(tl.sum(b_q * b_q, 1) + 1e-6)
    b_k_scale = tl.rsqrt(tl.sum(b_k * b_k, 1) + 1e-6)
    b_qk = tl.sum(b_q * b_k, 1) * b_q_scale * b_k_scale
    b_alpha = tl.exp(b_g)
    b_delta = b_beta[:, None] * (b_v - b_uk * (b_alpha * b_k_scale)[:, None])
    b_o = b_uq * (b_alpha * b_q_scale)[:, None] + b_delta * b_qk[:, None]
    return b_o, b_delta * b_k_scale[:, None]


@triton.jit
def load_request(p_cu_rows, p_prompts, p_depths, i_request, num_requests, num_rows):
    """Rows, prompt and depth of a request; the rows behind `cu_rows[-1]` are one more, without a prompt."""
    m_request = i_request < num_requests
    begin = tl.load(p_cu_rows + i_request).to(tl.int32)
    end = tl.load(p_cu_rows + i_request + 1, mask=m_request, other=num_rows).to(tl.int32)
    i_prompt = tl.load(p_prompts + i_request, mask=m_request, other=-1).to(tl.int64)
    depth = tl.load(p_depths + i_request, mask=m_request, other=0).to(tl.int32)
    return begin, end, i_prompt, depth


@triton.jit
def load_tile(
    start,
    end,
    depth,
    p_q,
    p_k,
    p_v,
    p_g,
    p_beta,
    p_records_k,
    p_slots,
    p_ancestors,
    s_q_n,
    s_q_h,
    s_k_n,
    s_k_h,
    s_v_n,
    s_v_h,
    s_g,
    s_beta,
    s_ancestors,
    i_h,
    i_hv,
    o_w,
    o_k,
    o_v,
    H: tl.constexpr,
    K: tl.constexpr,
    DEPTH_TILE: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
    KEY_IS_RECORD: tl.constexpr,
):
    """Everything of a tile of rows but the ancestors' records; rows past `end` are zeros with a PAD slot."""
    i_rows = (start + o_w).to(tl.int64)
    m_rows = i_rows < end
    i_slot = tl.load(p_slots + i_rows, mask=m_rows, other=-1).to(tl.int64)
    m_live = i_slot >= 0
    b_ancestors = load_ancestors(p_ancestors, i_rows, m_live, depth, s_ancestors, DEPTH_TILE, MAX_DEPTH)
    p_rows = p_q + (i_rows * s_q_n + i_h * s_q_h)[:, None] + o_k[None, :]
    b_xq = tl.load(p_rows, mask=m_rows[:, None], other=0.0)
    if KEY_IS_RECORD:
        p_key = p_records_k + ((i_slot * H + i_h) * K)[:, None] + o_k[None, :]
        b_xk = tl.load(p_key, mask=m_live[:, None], other=0.0)
    else:
        p_key = p_k + (i_rows * s_k_n + i_h * s_k_h)[:, None] + o_k[None, :]
        b_xk = tl.load(p_key, mask=m_rows[:, None], other=0.0)
    p_value = p_v + (i_rows * s_v_n + i_hv * s_v_h)[:, None] + o_v[None, :]
    b_v = tl.load(p_value, mask=m_rows[:, None], other=0.0)
    b_g = tl.load(p_g + i_rows * s_g + i_hv, mask=m_rows, other=0.0).to(tl.float32)
    b_beta = tl.load(p_beta + i_rows * s_beta + i_hv, mask=m_rows, other=0.0).to(tl.float32)
    return i_slot, b_xq, b_xk, b_v, b_g, b_beta, b_ancestors


@triton.jit
def load_ancestors(
    p_ancestors, i_rows, m_live, depth, s_ancestors, DEPTH_TILE: tl.constexpr, MAX_DEPTH: tl.constexpr
):
    """Slots of every row's ancestors, oldest first, PAD behind the depth: [BLOCK_W, DEPTH_TILE]."""
    if MAX_DEPTH > 0:
        o_d = tl.arange(0, DEPTH_TILE)
        p_rows = p_ancestors + (i_rows * s_ancestors)[:, None] + o_d[None, :]
        return tl.load(p_rows, mask=m_live[:, None] & (o_d < depth)[None, :], other=-1)
    else:
        return tl.full([i_rows.shape[0], DEPTH_TILE], -1, tl.int32)


@triton.jit(do_not_specialize=["num_rows", "num_requests", "num_splits", "s_ancestors"])
def gated_delta_replay_kernel(
    p_q,
    p_k,
    p_v,
    p_g,
    p_beta,
    p_state,
    p_records_g,
    p_records_delta,
    p_records_k,
    p_slots,
    p_ancestors,
    p_cu_rows,
    p_prompts,
    p_depths,
    p_o,
    num_rows,
    num_requests,
    num_splits,
    scale,
    s_q_n,
    s_q_h,
    s_k_n,
    s_k_h,
    s_v_n,
    s_v_h,
    s_g,
    s_beta,
    s_ancestors,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
    DEPTH_TILE: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    UNROLL: tl.constexpr,
    PREFETCH: tl.constexpr,
    SPLIT_STATE: tl.constexpr,
    KEY_IS_RECORD: tl.constexpr,
    UPCAST: tl.constexpr,
):
    i_split = tl.program_id(0)
    i_hv = tl.program_id(1) // (V // BLOCK_V)
    i_v = tl.program_id(1) % (V // BLOCK_V)
    i_request = tl.program_id(2)
    i_h = i_hv // (HV // H)
    o_w = tl.arange(0, BLOCK_W)
    o_k = tl.arange(0, K)
    o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    begin, end, i_prompt, depth = load_request(
        p_cu_rows, p_prompts, p_depths, i_request, num_requests, num_rows
    )
    begin += i_split * BLOCK_W
    if i_prompt < 0:
        for start in range(begin, end, num_splits * BLOCK_W):
            i_rows = (start + o_w).to(tl.int64)
            p_out = p_o + ((i_rows * HV + i_hv) * V)[:, None] + o_v[None, :]
            tl.store(p_out, tl.zeros([BLOCK_W, BLOCK_V], p_o.dtype.element_ty), mask=(i_rows < end)[:, None])
        return
    if begin >= end:
        return
    b_high, b_low = load_state(p_state, i_prompt, i_hv, o_k, o_v, HV, K, V, SPLIT_STATE)
    step = num_splits * BLOCK_W
    if PREFETCH:
        i_slot, b_xq, b_xk, b_v, b_g, b_beta, b_ancestors = load_tile(
            begin, end, depth, p_q, p_k, p_v, p_g, p_beta, p_records_k, p_slots, p_ancestors,
            s_q_n, s_q_h, s_k_n, s_k_h, s_v_n, s_v_h, s_g, s_beta, s_ancestors, i_h, i_hv, o_w, o_k, o_v,
            H, K, DEPTH_TILE, MAX_DEPTH, KEY_IS_RECORD,
        )  # fmt: skip
    for start in tl.range(begin, end, step, num_stages=STAGES if UNROLL else 1):
        if PREFETCH:
            i_slot_next, b_xq_next, b_xk_next, b_v_next, b_g_next, b_beta_next, b_ancestors_next = load_tile(
                start + step, end, depth, p_q, p_k, p_v, p_g, p_beta, p_records_k, p_slots, p_ancestors,
                s_q_n, s_q_h, s_k_n, s_k_h, s_v_n, s_v_h, s_g, s_beta, s_ancestors, i_h, i_hv, o_w, o_k, o_v,
                H, K, DEPTH_TILE, MAX_DEPTH, KEY_IS_RECORD,
            )  # fmt: skip
        else:
            i_slot, b_xq, b_xk, b_v, b_g, b_beta, b_ancestors = load_tile(
                start, end, depth, p_q, p_k, p_v, p_g, p_beta, p_records_k, p_slots, p_ancestors,
                s_q_n, s_q_h, s_k_n, s_k_h, s_v_n, s_v_h, s_g, s_beta, s_ancestors, i_h, i_hv, o_w, o_k, o_v,
                H, K, DEPTH_TILE, MAX_DEPTH, KEY_IS_RECORD,
            )  # fmt: skip
        b_o, b_delta = replay_rows(
            b_xq, b_xk, b_v.to(tl.float32), b_g, b_beta, b_high, b_low, b_ancestors, depth,
            p_records_g, p_records_delta, p_records_k, i_h, i_hv, o_k, o_v, scale,
            H, HV, K, V, MAX_DEPTH, DEPTH_TILE, STAGES, UNROLL, UPCAST,
        )  # fmt: skip
        i_rows = (start + o_w).to(tl.int64)
        m_live = i_slot >= 0
        b_o = tl.where(m_live[:, None], b_o, 0.0)
        p_out = p_o + ((i_rows * HV + i_hv) * V)[:, None] + o_v[None, :]
        tl.store(p_out, b_o.to(p_o.dtype.element_ty), mask=(i_rows < end)[:, None])
        p_new = p_records_delta + ((i_slot * HV + i_hv) * V)[:, None] + o_v[None, :]
        tl.store(p_new, b_delta.to(p_records_delta.dtype.element_ty), mask=m_live[:, None])
        if i_v == 0:
            tl.store(p_records_g + i_slot * HV + i_hv, b_g, mask=m_live)
            if not KEY_IS_RECORD and i_hv % (HV // H) == 0:
                p_key = p_records_k + ((i_slot * H + i_h) * K)[:, None] + o_k[None, :]
                tl.store(p_key, b_xk.to(p_records_k.dtype.element_ty), mask=m_live[:, None])
        if PREFETCH:
            i_slot, b_xq, b_xk, b_v = i_slot_next, b_xq_next, b_xk_next, b_v_next
            b_g, b_beta, b_ancestors = b_g_next, b_beta_next, b_ancestors_next
