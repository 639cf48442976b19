# mypy: disable-error-code="no-untyped-def"
"""The portable Triton kernel of projection replay, and the pieces of it that the fused layer step shares.

A program owns one value head (or a block of its value columns) of one request, keeps the prompt's state in
shared memory and walks over tiles of the request's beams. A tile is multiplied with the state first; then both
projections are carried over the records, oldest first. Nothing is ever divided by a decay.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MAX_TILE = tl.constexpr(16)
"""Ancestors of a row that are held in registers; a deeper tree's are read one after the other."""


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
def stacked_rows(BLOCK_W: tl.constexpr):
    """Beam of every row of a stacked tile, and whether the row is its k: eight q rows, their eight k rows, and so on.

    One product then serves q and k, the state's operand is read once, and a thread of a tensor core's tile owns
    q and k of the same beam, so that taking the product apart moves nothing.
    """
    o_x = tl.arange(0, 2 * BLOCK_W)
    return (o_x // 16) * 8 + o_x % 8, (o_x // 8) % 2 == 1


@triton.jit
def unstack(b_x):
    """The q rows and the k rows of a stacked tile [2 * BLOCK_W, X]."""
    b_x = b_x.reshape(b_x.shape[0] // 16, 2, 8, b_x.shape[1]).permute(0, 2, 3, 1)
    b_q, b_k = tl.split(b_x)
    return b_q.reshape(b_q.shape[0] * 8, b_q.shape[2]), b_k.reshape(b_k.shape[0] * 8, b_k.shape[2])


@triton.jit
def project(b_x, b_high, b_low, UPCAST: tl.constexpr):
    """Rows times the state [K, BLOCK_V], as fp32: bf16 rows meet both halves of the state, wider ones their sum."""
    if UPCAST or b_x.dtype != tl.bfloat16:
        b_state = b_high.to(tl.float32) + b_low.to(tl.float32)
        return tl.dot(b_x.to(tl.float32), b_state, input_precision="ieee" if UPCAST else "tf32x3")
    else:
        return tl.dot(b_x, b_low, tl.dot(b_x, b_high))


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
def replay_tile(
    b_x,
    b_high,
    b_low,
    b_ancestors,
    p_row_ancestors,
    m_live,
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
    UPCAST: tl.constexpr,
):
    """Both projections at a stacked tile's parents, of unscaled rows; the scales of q and k; their scaled product."""
    b_uq, b_uk = unstack(project(b_x, b_high, b_low, UPCAST))
    b_q, b_k = unstack(b_x)
    b_q = b_q.to(tl.float32)
    b_k = b_k.to(tl.float32)
    b_q_scale = scale * tl.rsqrt(tl.sum(b_q * b_q, 1) + 1e-6)
    b_k_scale = tl.rsqrt(tl.sum(b_k * b_k, 1) + 1e-6)
    b_qk = tl.sum(b_q * b_k, 1) * b_q_scale * b_k_scale
    if MAX_DEPTH > 0 and DEPTH_TILE > MAX_TILE:
        # So many slots would not stay in registers: one after the other, each asked for a record early.
        i_slot = tl.load(p_row_ancestors, mask=m_live & (depth > 0), other=-1)
        for j in tl.range(0, depth, num_stages=STAGES):
            i_after = tl.load(p_row_ancestors + j + 1, mask=m_live & (j + 1 < depth), other=-1)
            b_uq, b_uk = apply_record(
                i_slot, b_q, b_k, b_uq, b_uk, p_records_g, p_records_delta, p_records_k,
                i_h, i_hv, o_k, o_v, H, HV, K, V,
            )  # fmt: skip
            i_slot = i_after
    elif MAX_DEPTH > 0:
        o_d = tl.arange(0, DEPTH_TILE)
        for j in tl.range(0, depth, num_stages=STAGES):
            i_slot = tl.max(tl.where((o_d == j)[None, :], b_ancestors, -1), 1)
            b_uq, b_uk = apply_record(
                i_slot, b_q, b_k, b_uq, b_uk, p_records_g, p_records_delta, p_records_k,
                i_h, i_hv, o_k, o_v, H, HV, K, V,
            )  # fmt: skip
    return b_uq, b_uk, b_q_scale, b_k_scale, b_qk


@triton.jit
def load_rows(p_row, i_rows, m_rows, i_head, o_x, s_n, s_h):
    """One head's vector of every row, zeros where the mask is off."""
    return tl.load(
        p_row + (i_rows * s_n + i_head * s_h)[:, None] + o_x[None, :], mask=m_rows[:, None], other=0.0
    )


@triton.jit
def sigmoid(x, UPCAST: tl.constexpr):
    """1 / (1 + exp(-x)), by the approximate instructions alone: a division takes several times as many."""
    if UPCAST:
        return 1.0 / (1.0 + tl.exp(-x))
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; mul.ftz.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.ftz.f32 t, t, 0f3F800000; "
            "rcp.approx.ftz.f32 $0, t; }",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def gated_norm(b_o, b_z, b_weight, eps, V: tl.constexpr, UPCAST: tl.constexpr):
    """Norm every row, round to the gate's dtype, times the weight, times silu of the gate."""
    b_o = b_o * tl.rsqrt(tl.sum(b_o * b_o, 1) / V + eps)[:, None]
    b_o = b_o.to(b_z.dtype).to(tl.float32) * b_weight.to(tl.float32)[None, :]
    if b_weight.dtype == b_z.dtype:
        b_o = b_o.to(b_z.dtype).to(tl.float32)
    b_z = b_z.to(tl.float32)
    return b_o * b_z * sigmoid(b_z, UPCAST)


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
def load_stacked(
    start,
    end,
    p_q,
    p_k,
    p_records_k,
    p_slots,
    s_q_n,
    s_q_h,
    s_k_n,
    s_k_h,
    i_h,
    o_k,
    H: tl.constexpr,
    K: tl.constexpr,
    KEY_IS_RECORD: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """The q and k rows of a tile, stacked; rows past `end` are zeros."""
    o_beam, m_key = stacked_rows(BLOCK_W)
    i_beam = (start + o_beam).to(tl.int64)
    m_x = i_beam < end
    if KEY_IS_RECORD:
        i_slot = tl.load(p_slots + i_beam, mask=m_x, other=-1).to(tl.int64)
        m_x = m_x & (~m_key | (i_slot >= 0))
        p_key = p_records_k + (i_slot * H + i_h) * K
    else:
        p_key = p_k + (i_beam * s_k_n + i_h * s_k_h)
    p_x = tl.where(m_key, p_key, p_q + (i_beam * s_q_n + i_h * s_q_h))
    return tl.load(p_x[:, None] + o_k[None, :], mask=m_x[:, None], other=0.0)


@triton.jit
def prefetch_lines(p_line, m_line):
    """Ask for lines of 128 bytes to be brought to the L2 cache; addresses are int64 and of any shape."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [p_line, m_line.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_pair(p_a, p_b, m_a, m_b, A: tl.constexpr, B: tl.constexpr):
    """Prefetch two sets of rows, of A and B elements, all threads asking for lines of their own."""
    A_BYTES: tl.constexpr = A * p_a.dtype.element_ty.primitive_bitwidth // 8
    B_BYTES: tl.constexpr = B * p_b.dtype.element_ty.primitive_bitwidth // 8
    LINES: tl.constexpr = (max(A_BYTES, B_BYTES) + 127) // 128
    o_line = tl.arange(0, 2 * LINES)[None, :]
    o_byte = o_line % LINES * 128
    p_line = tl.where(o_line < LINES, p_a.to(tl.int64)[:, None], p_b.to(tl.int64)[:, None]) + o_byte
    m_line = tl.where(o_line < LINES, m_a[:, None], m_b[:, None])
    if A_BYTES != B_BYTES:
        m_line = m_line & (o_byte < tl.where(o_line < LINES, A_BYTES, B_BYTES))
    prefetch_lines(p_line, m_line)


@triton.jit
def prefetch_rows(p_row, m_row, WIDTH: tl.constexpr):
    """Prefetch rows of WIDTH elements; p_row and its mask are of any shape."""
    LINE: tl.constexpr = 1024 // p_row.dtype.element_ty.primitive_bitwidth
    for i in tl.static_range((WIDTH + LINE - 1) // LINE):
        prefetch_lines((p_row + i * LINE).to(tl.int64), m_row)


@triton.jit
def load_ancestors(
    p_ancestors, i_rows, m_live, depth, s_ancestors, DEPTH_TILE: tl.constexpr, MAX_DEPTH: tl.constexpr
):
    """Slots of every row's ancestors, oldest first, PAD behind the depth: [BLOCK_W, DEPTH_TILE]; unless too many."""
    if MAX_DEPTH > 0 and DEPTH_TILE <= MAX_TILE:
        o_d = tl.arange(0, DEPTH_TILE)
        p_rows = p_ancestors + (i_rows * s_ancestors)[:, None] + o_d[None, :]
        return tl.load(p_rows, mask=m_live[:, None] & (o_d < depth)[None, :], other=-1)
    else:
        return tl.full([i_rows.shape[0], 2], -1, tl.int32)


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
    p_z,
    p_norm_weight,
    p_o,
    num_rows,
    num_requests,
    num_splits,
    scale,
    norm_eps,
    s_q_n,
    s_q_h,
    s_k_n,
    s_k_h,
    s_v_n,
    s_v_h,
    s_g,
    s_beta,
    s_z,
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
    PREFETCH: tl.constexpr,
    SPLIT_STATE: tl.constexpr,
    KEY_IS_RECORD: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # Behind a longer loop over the records, or before a norm, the rows of v would be registers too many.
    V_FIRST: tl.constexpr = MAX_DEPTH == 0 or (DEPTH_TILE <= 2 and not NORM)
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
    if OVERLAP:
        gdc_launch_dependents()
    if i_prompt < 0:
        if OVERLAP:
            gdc_wait()
        for start in range(begin, end, num_splits * BLOCK_W):
            i_rows = (start + o_w).to(tl.int64)
            p_out = p_o + ((i_rows * HV + i_hv) * V)[:, None] + o_v[None, :]
            tl.store(p_out, tl.zeros([BLOCK_W, BLOCK_V], p_o.dtype.element_ty), mask=(i_rows < end)[:, None])
        return
    if begin >= end:
        # Even so: who waits for this kernel relies on the one before being over too.
        if OVERLAP:
            gdc_wait()
        return
    if PREFETCH:
        # The first tile and the second half of the state come while the first half is waited for.
        i_rows = (begin + o_w).to(tl.int64)
        p_first = p_v + i_rows * s_v_n + i_hv * s_v_h + i_v * BLOCK_V
        prefetch_pair(p_q + i_rows * s_q_n + i_h * s_q_h, p_first, i_rows < end, i_rows < end, K, BLOCK_V)
        if SPLIT_STATE:
            p_low = p_state + ((i_prompt * HV + i_hv) * 2 + 1) * (V * K) + o_v * K
            prefetch_rows(p_low, o_v >= 0, K)
    b_high, b_low = load_state(p_state, i_prompt, i_hv, o_k, o_v, HV, K, V, SPLIT_STATE)
    if OVERLAP:
        # The state and the requests' bounds were loaded while the kernel before this one drained.
        gdc_wait()
    step = num_splits * BLOCK_W
    for start in range(begin, end, step):
        i_rows = (start + o_w).to(tl.int64)
        m_rows = i_rows < end
        i_slot = tl.load(p_slots + i_rows, mask=m_rows, other=-1).to(tl.int64)
        m_live = i_slot >= 0
        b_x = load_stacked(
            start, end, p_q, p_k, p_records_k, p_slots, s_q_n, s_q_h, s_k_n, s_k_h, i_h, o_k,
            H, K, KEY_IS_RECORD, BLOCK_W,
        )  # fmt: skip
        b_g = tl.load(p_g + i_rows * s_g + i_hv, mask=m_rows, other=0.0).to(tl.float32)
        b_beta = tl.load(p_beta + i_rows * s_beta + i_hv, mask=m_rows, other=0.0).to(tl.float32)
        b_ancestors = load_ancestors(p_ancestors, i_rows, m_live, depth, s_ancestors, DEPTH_TILE, MAX_DEPTH)
        if V_FIRST:
            b_v = load_rows(p_v, i_rows, m_rows, i_hv, o_v, s_v_n, s_v_h)
        if not KEY_IS_RECORD and (i_v == 0) & (i_hv % (HV // H) == 0):
            _, b_key = unstack(b_x)
            p_key = p_records_k + ((i_slot * H + i_h) * K)[:, None] + o_k[None, :]
            tl.store(p_key, b_key.to(p_records_k.dtype.element_ty), mask=m_live[:, None])
        if PREFETCH:
            i_next = i_rows + step
            m_next = i_next < end
            b_next = load_ancestors(p_ancestors, i_next, m_next, depth, s_ancestors, DEPTH_TILE, MAX_DEPTH)
            p_next_v = p_v + i_next * s_v_n + i_hv * s_v_h + i_v * BLOCK_V
            prefetch_pair(p_q + i_next * s_q_n + i_h * s_q_h, p_next_v, m_next, m_next, K, BLOCK_V)
            if KEY_IS_RECORD:
                i_slot_next = tl.load(p_slots + i_next, mask=m_next, other=-1).to(tl.int64)
                p_next_k = p_records_k + (i_slot_next * H + i_h) * K
                m_next_k = i_slot_next >= 0
            else:
                p_next_k = p_k + i_next * s_k_n + i_h * s_k_h
                m_next_k = m_next
            if NORM:
                prefetch_pair(p_next_k, p_z + i_rows * s_z + i_hv * V, m_next_k, m_live, K, V)
            else:
                prefetch_rows(p_next_k, m_next_k, K)
        b_uq, b_uk, b_q_scale, b_k_scale, b_qk = replay_tile(
            b_x, b_high, b_low, b_ancestors, p_ancestors + i_rows * s_ancestors, m_live, depth,
            p_records_g, p_records_delta, p_records_k, i_h, i_hv, o_k, o_v, scale,
            H, HV, K, V, MAX_DEPTH, DEPTH_TILE, STAGES, UPCAST,
        )  # fmt: skip
        if not V_FIRST:
            b_v = load_rows(p_v, i_rows, m_rows, i_hv, o_v, s_v_n, s_v_h)
        if MAX_DEPTH > 0 and PREFETCH and DEPTH_TILE <= MAX_TILE:
            i_above = b_next.to(tl.int64)
            p_above = p_records_delta + (i_above * HV + i_hv) * V + i_v * BLOCK_V
            prefetch_rows(p_records_k + (i_above * H + i_h) * K, i_above >= 0, K)
            prefetch_rows(p_above, i_above >= 0, BLOCK_V)
        b_alpha = tl.exp(b_g)
        b_delta = b_beta[:, None] * (b_v.to(tl.float32) - b_uk * (b_alpha * b_k_scale)[:, None])
        b_o = b_uq * (b_alpha * b_q_scale)[:, None] + b_delta * b_qk[:, None]
        p_new = p_records_delta + ((i_slot * HV + i_hv) * V)[:, None] + o_v[None, :]
        b_delta = b_delta * b_k_scale[:, None]
        tl.store(p_new, b_delta.to(p_records_delta.dtype.element_ty), mask=m_live[:, None])
        if i_v == 0:
            tl.store(p_records_g + i_slot * HV + i_hv, b_g, mask=m_live)
        if NORM:
            b_z = load_rows(p_z, i_rows, m_live, i_hv, o_v, s_z, V)
            b_o = gated_norm(b_o, b_z, tl.load(p_norm_weight + o_v), norm_eps, V, UPCAST)
        b_o = tl.where(m_live[:, None], b_o, 0.0)
        p_out = p_o + ((i_rows * HV + i_hv) * V)[:, None] + o_v[None, :]
        tl.store(p_out, b_o.to(p_o.dtype.element_ty), mask=m_rows[:, None])
