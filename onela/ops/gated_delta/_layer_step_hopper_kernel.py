"""The whole layer step for Hopper (Gluon) in one launch: convolution, gates, replay, norm.

The replay kernel's plan, with the convolution in front of its products: a tile's ring begins with the inputs of q's
window (ancestors', then the row's own), then k's, and has v's where v was. The window is summed stage by stage, the
result put back where the row's own input lay, and read from there as any stage. q, k and v never leave the chip.

A thread that sums has 8 channels of 4 rows, so that it needs few weights. Rows stay with their warp throughout.
"""

# ruff: noqa: RUF005, SIM102  (Gluon has no starred tuples, and mixes run-time and compile-time conditions badly)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onela.ops.gated_delta._replay_hopper_kernel import (
    FAR,
    L2NORM_EPS,
    copy_half_rows,
    copy_rows,
    gated_norm,
    key_dots,
    load_delta,
    load_stages,
    product,
    sigmoid,
    state_rows,
    to_pieces,
    widen,
)
from onela.ops.gated_delta._replay_hopper_layouts import (
    conv_layout,
    dots_layout,
    layer_geometry,
    operand_layout,
    piece_layout,
    row_image,
    taps_layout,
)

TAPS = gl.constexpr(4)


@gluon.jit
def copy_stage(ring, place, n, index, base, stride, S: gl.constexpr, G: gl.constexpr):
    """Start the copy of stage S of the tile of rows n; index holds their slots, then their ancestors' slots."""
    dst = ring.index(place)
    PIECE: gl.constexpr = piece_layout(G.NW)
    if S < G.KEYS:
        # Inputs of the convolution: of v, q or k; of an ancestor, or the row's own.
        PART: gl.constexpr = S // G.WINDOW
        AT: gl.constexpr = S % G.WINDOW
        if AT < G.WINDOW - 1:
            at = index[1 + G.T - (G.WINDOW - 1) + AT]
            copy_rows(dst, base[3 + PART], at.to(gl.int64) * G.C, at >= 0, PIECE)
        else:
            copy_rows(dst, base[PART], n.to(gl.int64) * stride[0], index[0] >= 0, PIECE)
    elif S < G.DELTAS:
        at = index[1 + S - G.KEYS]
        copy_rows(dst, base[6], at.to(gl.int64) * G.HK, at >= 0, PIECE)
    elif S < G.GATE:
        at = index[1 + (S - G.DELTAS) // G.DS]
        if G.DS == 1:
            copy_rows(dst, base[7], at.to(gl.int64) * G.HVV, at >= 0, PIECE)
        else:
            copy_half_rows(dst, base[7], at, (S - G.DELTAS) % 2, G)
    else:
        copy_rows(dst, base[8], n.to(gl.int64) * stride[1], index[0] >= 0, PIECE)


@gluon.jit
def copy_ahead(ring, place, n, indices, base, stride, S: gl.constexpr, G: gl.constexpr):
    """Start the copy of stage S, counted from the first one of the tile of rows n on into the next two tiles."""
    AT: gl.constexpr = S % G.STAGES
    TILE: gl.constexpr = S // G.STAGES
    copy_stage(ring, place, n + TILE * G.BW, indices[TILE], base, stride, AT, G)
    async_copy.commit_group()


@gluon.jit
def refill(ring, place, n, indices, base, stride, S: gl.constexpr, G: gl.constexpr):
    """Stage S has been read: start the copy that is RING stages on in its place. Returns the next place."""
    copy_ahead(ring, place, n, indices, base, stride, S + G.RING, G)
    return (place + 1) % G.RING


@gluon.jit
def load_index(p_slots, p_ancestors, s_ancestors, shift, n, end, T: gl.constexpr):
    """Slots of the rows n and of their ancestors, the newest last; PAD for what is padding or does not exist."""
    slot = gl.load(p_slots + n, mask=n < end, other=-1)
    index = (slot,)
    for j in gl.static_range(T):
        exists = (n < end) & (j + shift >= 0)
        at = gl.load(p_ancestors + n.to(gl.int64) * s_ancestors + (j + shift), mask=exists, other=-1)
        index = index + (gl.where(slot >= 0, at, -1),)
    return index


@gluon.jit
def load_taps(p_weight, NW: gl.constexpr):
    """The four weights of each of 128 channels, oldest input first; each [128] fp32."""
    CHANNELS: gl.constexpr = gl.SliceLayout(0, conv_layout(NW))
    w = widen(gl.load(p_weight + gl.arange(0, 128 * TAPS, layout=taps_layout(NW))))
    even, odd = w.reshape([128, 2, 2]).split()
    w_0, w_2 = even.split()
    w_1, w_3 = odd.split()
    w_0 = gl.convert_layout(w_0, CHANNELS, assert_trivial=True)
    w_1 = gl.convert_layout(w_1, CHANNELS, assert_trivial=True)
    w_2 = gl.convert_layout(w_2, CHANNELS, assert_trivial=True)
    w_3 = gl.convert_layout(w_3, CHANNELS, assert_trivial=True)
    return w_0, w_1, w_2, w_3


@gluon.jit
def prompt_tail(p_weight, p_conv_state, channel, live, depth, NW: gl.constexpr):
    """The part of the window that reaches into the prompt, the same for all of its beams: [128] fp32."""
    channels = channel + gl.arange(0, 128, layout=gl.SliceLayout(0, conv_layout(NW)))
    w = load_taps(p_weight + channel * TAPS, NW)
    tail = gl.zeros([128], gl.float32, gl.SliceLayout(0, conv_layout(NW)))
    for i in gl.static_range(TAPS - 1):
        reaches = live & (i + depth < TAPS - 1)
        x = gl.load(
            p_conv_state + channels * (TAPS - 1) + (i + depth), mask=(channels >= 0) & reaches, other=0.0
        )
        tail += w[i] * x.to(gl.float32)
    return tail


@gluon.jit
def convolve(
    ring, place, n, indices, base, stride, conv, channel, tail, written, S: gl.constexpr, G: gl.constexpr
):  # fmt: skip
    """Sum the window of 128 channels whose first stage is S, through SiLU; record the rows' own inputs.

    The result lies where the own input lay: returns its place, which is yet to be refilled.
    """
    p_weight, p_conv_state, p_record, live, depth = conv
    CONV: gl.constexpr = conv_layout(G.NW)
    PIECE: gl.constexpr = piece_layout(G.NW)
    BW: gl.constexpr = G.BW
    w = load_taps(p_weight + channel * TAPS, G.NW)
    y = gl.zeros([BW, 128], gl.float32, CONV)
    if G.WINDOW < TAPS:
        y += tail[None, :]
    else:
        if depth < TAPS - 1:
            y += prompt_tail(p_weight, p_conv_state, channel, live, depth, G.NW)[None, :]
    for i in gl.static_range(G.WINDOW - 1):
        x = widen(load_stages(ring, place, 1, CONV, G)[0])
        place = refill(ring, place, n, indices, base, stride, S + i, G)
        y += x * w[TAPS - G.WINDOW + i][None, :]
    own = load_stages(ring, place, 1, PIECE, G)[0]
    y += widen(ring.index(place).load(CONV)) * w[TAPS - 1][None, :]
    y = y * sigmoid(y)
    ring.index(place).store(y.to(gl.bfloat16))
    out = gl.arange(0, 128, layout=gl.SliceLayout(0, PIECE))
    gl.store(p_record + channel + out[None, :], own, mask=written)
    return place


@gluon.jit(do_not_specialize=["N", "B", "rows_per_program", "s_a", "s_b", "s_ancestors"])
def gated_delta_layer_step_hopper_kernel(
    p_x,
    p_z,
    p_a,
    p_b,
    p_weight,
    p_A_log,
    p_dt_bias,
    p_norm_weight,
    p_state,
    p_conv_state,
    p_records_g,
    p_records_delta,
    p_records_k,
    p_records_x,
    p_slots,
    p_ancestors,
    p_cu_rows,
    p_prompts,
    p_depths,
    p_o,
    N,
    B,
    rows_per_program,
    scale,
    norm_eps,
    s_x,
    s_z,
    s_a,
    s_b,
    s_ancestors,
    H: gl.constexpr,
    HV: gl.constexpr,
    T: gl.constexpr,
    BPAD: gl.constexpr,
    NW: gl.constexpr,
    RING: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    DS: gl.constexpr = 1 if p_records_delta.dtype.element_ty == gl.bfloat16 else 2
    G: gl.constexpr = layer_geometry(H, HV, T, NW, RING, DS)
    BW: gl.constexpr = G.BW
    REACH: gl.constexpr = G.REACH
    PIECE: gl.constexpr = piece_layout(NW)
    OPERAND: gl.constexpr = operand_layout(NW)
    ROW: gl.constexpr = gl.SliceLayout(1, PIECE)
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[NW, 1], instr_shape=[16, 128, 16]
    )
    DOT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dots_layout(NW), k_width=2)
    STATE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    STATE_COPY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [NW, 1], [1, 0])
    REQUESTS: gl.constexpr = gl.BlockedLayout([BPAD // 32], [32], [NW], [0])

    pid = gl.program_id(0)
    i_hv = pid % HV
    i_h = i_hv // (HV // H)
    # Channels and keys that several value heads share are recorded by the first of them.
    owner = i_hv % (HV // H) == 0
    first = (pid // HV) * rows_per_program
    last = gl.minimum(first + rows_per_program, N)

    state = gl.allocate_shared_memory(gl.bfloat16, [2, 128, 128], STATE)
    ring = gl.allocate_shared_memory(gl.bfloat16, [RING, BW, 128], row_image(NW))

    # First channels of this program's q, k and v.
    c_q, c_k, c_v = i_h * 128, G.HK + i_h * 128, 2 * G.HK + i_hv * 128
    column = i_hv * 128
    base = (
        p_x + c_v,
        p_x + c_q,
        p_x + c_k,
        p_records_x + c_v,
        p_records_x + c_q,
        p_records_x + c_k,
        p_records_k + i_h * 128,
        p_records_delta + column,
        p_z + column,
    )
    stride = (s_x.to(gl.int64), s_z.to(gl.int64))
    requests = gl.arange(0, BPAD, layout=REQUESTS)
    ends = gl.load(p_cu_rows + 1 + requests, mask=requests < B, other=FAR).to(gl.int32)
    prompts = gl.load(p_prompts + requests, mask=requests < B, other=-1).to(gl.int32)
    rate = -gl.exp(gl.load(p_A_log + i_hv).to(gl.float32))
    bias = gl.load(p_dt_bias + i_hv).to(gl.float32)

    start = first
    while start < last:
        # The rows [start, end) belong to one request, or lie past the last one (then its prompt is PAD).
        end = gl.minimum(gl.min(gl.where(ends > start, ends, FAR), axis=0), last)
        request = gl.sum((ends <= start).to(gl.int32), axis=0)
        prompt = gl.max(gl.where(requests == request, prompts, -1), axis=0)
        live = prompt >= 0
        live_end = gl.where(live, end, start)

        v_rows = state_rows(STATE_COPY)
        cols = gl.arange(0, 128, layout=gl.SliceLayout(0, STATE_COPY))
        p_block = p_state + (gl.maximum(prompt, 0).to(gl.int64) * HV + i_hv) * (2 * 128 * 128)
        for half in gl.static_range(2):
            async_copy.async_copy_global_to_shared(
                state.index(half),
                p_block + half * 128 * 128 + (v_rows * 128)[:, None] + cols[None, :],
                mask=(v_rows >= 0)[:, None] & live,
            )
        async_copy.commit_group()
        depth = gl.load(p_depths + request, mask=live, other=0).to(gl.int32)
        p_tail = p_conv_state + gl.maximum(prompt, 0).to(gl.int64) * (G.C * (TAPS - 1))
        tail_v = gl.to_tensor(0.0)
        tail_q = tail_v
        tail_k = tail_v
        if G.WINDOW < TAPS:
            tail_v = prompt_tail(p_weight, p_tail, c_v, live, depth, NW)
            tail_q = prompt_tail(p_weight, p_tail, c_q, live, depth, NW)
            tail_k = prompt_tail(p_weight, p_tail, c_k, live, depth, NW)
        # All that comes from the prompt is loaded while the kernel before this one drains.
        if OVERLAP:
            if start == first:
                gdc_launch_dependents()
                gdc_wait()
        # A request of fewer ancestors than T has them at the end of its index.
        shift = depth - T
        n = start + gl.arange(0, BW, layout=ROW)
        index = load_index(p_slots, p_ancestors, s_ancestors, shift, n, live_end, T)
        index_1 = load_index(p_slots, p_ancestors, s_ancestors, shift, n + BW, live_end, T)
        index_2 = index_1
        if REACH == 2:
            index_2 = load_index(p_slots, p_ancestors, s_ancestors, shift, n + 2 * BW, live_end, T)
        b_a = gl.load(p_a + n.to(gl.int64) * s_a + i_hv, mask=n < live_end, other=0.0)
        b_b = gl.load(p_b + n.to(gl.int64) * s_b + i_hv, mask=n < live_end, other=0.0)
        for s in gl.static_range(RING):
            copy_ahead(ring, s, n, (index, index_1), base, stride, s, G)
        async_copy.wait_group(RING)
        fence_async_shared()
        gl.thread_barrier()

        place = gl.to_tensor(0)
        for _ in range(gl.cdiv(end - start, BW)):
            # A tile's index is loaded one tile before its first copy starts.
            index_3 = load_index(p_slots, p_ancestors, s_ancestors, shift, n + (REACH + 1) * BW, live_end, T)
            if REACH == 1:
                index_2 = index_3
            indices = (index, index_1, index_2)
            more = n + BW < live_end
            a_1 = gl.load(p_a + (n + BW).to(gl.int64) * s_a + i_hv, mask=more, other=0.0)
            b_1 = gl.load(p_b + (n + BW).to(gl.int64) * s_b + i_hv, mask=more, other=0.0)
            slot = index[0].to(gl.int64)
            written = (slot >= 0)[:, None]
            shared = written & owner
            out = gl.arange(0, 128, layout=gl.SliceLayout(0, PIECE))
            p_record = p_records_x + (slot * G.C)[:, None]
            conv = (p_weight, p_tail, p_record, live, depth)

            place = convolve(ring, place, n, indices, base, stride, conv, c_v, tail_v, written, 0, G)
            v = ring.index(place).load(PIECE)
            place = refill(ring, place, n, indices, base, stride, G.WINDOW - 1, G)
            place = convolve(ring, place, n, indices, base, stride, conv, c_q, tail_q, shared, G.WINDOW, G)
            xq = ring.index(place).load(OPERAND)
            place = refill(ring, place, n, indices, base, stride, 2 * G.WINDOW - 1, G)
            place = convolve(
                ring, place, n, indices, base, stride, conv, c_k, tail_k, shared, 2 * G.WINDOW, G
            )
            xk = ring.index(place).load(OPERAND)
            p_key = p_records_k + i_h * 128 + (slot * G.HK)[:, None] + out[None, :]
            gl.store(p_key, ring.index(place).load(PIECE), mask=shared)
            place = refill(ring, place, n, indices, base, stride, G.KEYS - 1, G)

            # One product for both: a warp's tile is [8 rows of q; 8 rows of k].
            a = gl.join(xq.reshape([NW, 8, 128]), xk.reshape([NW, 8, 128])).permute(0, 3, 1, 2)
            operand = gl.convert_layout(a.reshape([2 * BW, 128]), DOT, assert_trivial=True)
            acc = product((operand,), state, BW, 1, MMA)
            lefts = (gl.convert_layout(a.reshape([NW, 16, 128]), LEFT, assert_trivial=True),)
            qq, _kq = key_dots(lefts, (xq,), 1, NW)
            qk, kk = key_dots(lefts, (xk,), 1, NW)
            q_scale = scale * gl.rsqrt(qq + L2NORM_EPS)
            k_scale = gl.rsqrt(kk + L2NORM_EPS)
            qk = qk * q_scale * k_scale

            x = b_a.to(gl.float32) + bias
            b_g = rate * (gl.maximum(x, 0.0) + gl.log(1.0 + gl.exp(-gl.abs(x))))
            b_beta = sigmoid(b_b.to(gl.float32))
            decays = ()
            for j in gl.static_range(T):
                at = index[1 + j]
                p_decay = p_records_g + at.to(gl.int64) * HV + i_hv
                decays = decays + (gl.load(p_decay, mask=at >= 0, other=0.0),)
            coefficients = ()
            for j in gl.static_range(T):
                keys = load_stages(ring, place, 1, OPERAND, G)
                place = refill(ring, place, n, indices, base, stride, G.KEYS + j, G)
                coefficients = coefficients + key_dots(lefts, keys, 1, NW)
            # Decays as suffix sums of g, so that nothing is ever divided by a decay.
            decay = b_g
            weights = ()
            for i in gl.static_range(T):
                weights = weights + (gl.exp(decay),)
                decay = decay + decays[T - 1 - i]
            decay = gl.exp(decay)

            acc, _a = warpgroup_mma_wait(0, deps=[acc, operand])
            uq, uk = acc.reshape([NW, 2, 8, 128]).permute(0, 2, 3, 1).split()
            uq = to_pieces(uq.reshape([BW, 128]), BW, NW) * (q_scale * decay)[:, None]
            uk = to_pieces(uk.reshape([BW, 128]), BW, NW) * (k_scale * decay)[:, None]
            for j in gl.static_range(T):
                delta = load_delta(ring, place, G)
                for i in gl.static_range(DS):
                    place = refill(ring, place, n, indices, base, stride, G.DELTAS + j * DS + i, G)
                weight = weights[T - 1 - j]
                uq += delta * (coefficients[2 * j] * q_scale * weight)[:, None]
                uk += delta * (coefficients[2 * j + 1] * k_scale * weight)[:, None]
            delta = b_beta[:, None] * (widen(v) - uk)
            b_o = uq + delta * qk[:, None]
            b_weight = gl.load(p_norm_weight + out)
            b_z = load_stages(ring, place, 1, PIECE, G)[0]
            place = refill(ring, place, n, indices, base, stride, G.GATE, G)
            # A padding row's gate has come as zeros, and makes its output zero.
            b_o = gated_norm(b_o, b_z, b_weight, norm_eps, 128)
            p_rows = p_o + (n.to(gl.int64) * G.HVV + column)[:, None] + out[None, :]
            gl.store(p_rows, b_o.to(p_o.dtype.element_ty), mask=(n < end)[:, None])
            p_rows = p_records_delta + column + (slot * G.HVV)[:, None] + out[None, :]
            b_record = (delta * k_scale[:, None]).to(p_records_delta.dtype.element_ty)
            gl.store(p_rows, b_record, mask=written)
            gl.store(p_records_g + slot * HV + i_hv, b_g, mask=slot >= 0)
            n += BW
            b_a = a_1
            b_b = b_1
            index = index_1
            index_1 = index_2
            if REACH == 2:
                index_2 = index_3
        # The next request's state goes where this one's lies: every warp must be done with it.
        async_copy.wait_group(0)
        gl.thread_barrier()
        start = end
