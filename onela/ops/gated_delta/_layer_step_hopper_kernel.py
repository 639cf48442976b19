"""The whole layer step for Hopper (Gluon) in one launch: convolution, gates, replay, norm.

The replay kernel's plan, with the convolution in front of its products: a tile's ring begins with the inputs of the
windows of v, q and k, an ancestor's after the other's and the rows' own last. They are summed as they arrive; the sums
go through SiLU and back to where the own inputs lay, and are read from there as any stage. q, k and v never leave the
chip. Weights and the prompt's part of the windows lie in shared memory, in fp32.

A thread that sums has 8 channels of 4 rows, so that it needs few weights. Rows stay with their warp throughout.
"""

# ruff: noqa: RUF005  (Gluon has no starred tuples)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onela.ops.gated_delta._replay_hopper_layouts import (
    conv_layout,
    dots_layout,
    layer_geometry,
    operand_layout,
    piece_layout,
    row_image,
)
from onela.ops.gated_delta._replay_hopper_parts import (
    FAR,
    L2NORM_EPS,
    copy_ahead,
    copy_half_rows,
    copy_rows,
    copy_state,
    gated_norm,
    key_dots,
    load_decays,
    load_delta,
    load_stages,
    multiply,
    prefetch_rows,
    product,
    refill,
    request_at,
    sigmoid,
    silu,
    suffix_decays,
    take_apart,
    widen,
)

TAPS = gl.constexpr(4)
# Weights are multiplied by it in shared memory: a sum is then ready for the power of two in its SiLU.
MINUS_LOG2E = gl.constexpr(-1.4426950408889634)
# Rows of the weights in shared memory: the taps of v, q and k, then what the prompt adds to each.
TAILS = gl.constexpr(12)


@gluon.jit
def copy_stage(ring, place, n, index, base, stride, S: gl.constexpr, G: gl.constexpr):
    """Start the copy of stage S of the tile of rows n; index holds their slots, then their ancestors' slots.

    The rows' own are copied whatever their slots, so that the first copies need not wait for the index.
    """
    dst = ring.index(place)
    PIECE: gl.constexpr = piece_layout(G.NW)
    if S < G.OWN:
        # Inputs of an ancestor, of v, q or k.
        at = index[1 + G.T - G.PAST + S // 3]
        copy_rows(dst, base[3 + S % 3], at.to(gl.int64) * G.C, at >= 0, PIECE)
    elif S < G.GATE:
        copy_rows(dst, base[S - G.OWN], n.to(gl.int64) * stride[0], n < stride[2], PIECE)
    elif S == G.GATE:
        copy_rows(dst, base[8], n.to(gl.int64) * stride[1], n < stride[2], PIECE)
    elif S < G.DELTAS:
        at = index[1 + S - G.KEYS]
        copy_rows(dst, base[6], at.to(gl.int64) * G.HK, at >= 0, PIECE)
    else:
        at = index[1 + (S - G.DELTAS) // G.DS]
        if G.DS == 1:
            copy_rows(dst, base[7], at.to(gl.int64) * G.HVV, at >= 0, PIECE)
        else:
            copy_half_rows(dst, base[7], at, (S - G.DELTAS) % 2, G)


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
def scaled_silu(scaled):
    """SiLU of y from -log2(e) y, as -log2(e) y / (-log2(e) - log2(e) exp(-y))."""
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 e;
        ex2.approx.ftz.f32 e, $1;
        fma.rn.ftz.f32 e, e, 0fBFB8AA3B, 0fBFB8AA3B;
        rcp.approx.ftz.f32 e, e;
        mul.ftz.f32 $0, $1, e;
        }""",
        "=f,f",
        [scaled],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def scaled_silu_pairs(scaled):
    """The same, two at a time with one reciprocal: 1 / a = b / (a b).

    a and b are times log2(e) / 2^60 and end at 1, so that their product is a normal number: a saturating multiply-add
    costs nothing, a minimum before the exponent would. The reciprocal takes the factor and the sign back.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 a, b, r, s;
        ex2.approx.ftz.f32 a, $2;
        ex2.approx.ftz.f32 b, $3;
        fma.rn.ftz.sat.f32 a, a, 0f21B8AA3B, 0f21B8AA3B;
        fma.rn.ftz.sat.f32 b, b, 0f21B8AA3B, 0f21B8AA3B;
        mul.ftz.f32 r, a, b;
        rcp.approx.ftz.f32 r, r;
        mul.ftz.f32 r, r, 0fA1800000;
        mul.ftz.f32 s, $2, r;
        mul.ftz.f32 r, $3, r;
        mul.ftz.f32 $0, s, b;
        mul.ftz.f32 $1, r, a;
        }""",
        "=&f,=&f,f,f",
        [scaled],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def silu_by_tanh(x):
    """SiLU of bf16 in fp32, as x / 2 + x / 2 tanh(x / 2): one special function instead of an exponent and a reciprocal.

    The hardware's tanh is not exact to the last place: the result is off by up to 1e-5 (measured on an H200 from -24 to
    24), half a unit in the last place of bf16 at -8 and less above it.
    """
    half = widen(multiply(x, gl.full_like(x, 0.5)))
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 t;
        tanh.approx.f32 t, $1;
        fma.rn.ftz.f32 $0, $1, t, $1;
        }""",
        "=f,f",
        [half],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def keep_rows(x, keep):
    """x where keep is -1, zeros where it is 0; bf16, two at a time."""
    return gl.inline_asm_elementwise(
        "and.b32 $0, $1, $2;", "=r,r,r,r", [x, keep], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.constexpr_function
def channel_layout(G):
    """One of 128 channels a thread."""
    return gl.BlockedLayout([1], [32], [G.NW], [0])


@gluon.jit
def load_taps(p_weight, channels, G: gl.constexpr):
    """The weights of v, q and k, a channel's four together: three times [128, 4]."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, TAPS], [32, 1], [G.NW, 1], [1, 0])
    inputs = gl.arange(0, TAPS, layout=gl.SliceLayout(0, LAYOUT))
    weights = ()
    for part in gl.static_range(3):
        at = channels[part] + gl.arange(0, 128, layout=gl.SliceLayout(1, LAYOUT))
        weights = weights + (gl.load(p_weight + at[:, None] * TAPS + inputs[None, :]),)
    return weights


@gluon.jit
def split_taps(weights, G: gl.constexpr):
    """The four weights of each channel, oldest input first, times -log2(e): each [128] fp32, one channel a thread."""
    CHANNEL: gl.constexpr = channel_layout(G)
    even, odd = (weights.to(gl.float32) * MINUS_LOG2E).reshape([128, 2, 2]).split()
    w_0, w_2 = even.split()
    w_1, w_3 = odd.split()
    w_0 = gl.convert_layout(w_0, CHANNEL, assert_trivial=True)
    w_1 = gl.convert_layout(w_1, CHANNEL, assert_trivial=True)
    w_2 = gl.convert_layout(w_2, CHANNEL, assert_trivial=True)
    w_3 = gl.convert_layout(w_3, CHANNEL, assert_trivial=True)
    return w_0, w_1, w_2, w_3


@gluon.jit
def store_taps(taps, weights, G: gl.constexpr):
    """Put the weights that a window of this depth needs into shared memory."""
    for part in gl.static_range(3):
        w = split_taps(weights[part], G)
        for i in gl.static_range(TAPS):
            if i >= TAPS - 1 - G.PAST:
                taps.index(part * TAPS + i).store(w[i])


@gluon.jit
def load_past(p_conv_state, channels, live, G: gl.constexpr):
    """The prompt's last inputs of v, q and k, oldest first: three times [128], one channel a thread."""
    past = ()
    for part in gl.static_range(3):
        at = channels[part] + gl.arange(0, 128, layout=channel_layout(G))
        inputs = ()
        for i in gl.static_range(TAPS - 1):
            inputs = inputs + (gl.load(p_conv_state + at * (TAPS - 1) + i, mask=(at >= 0) & live, other=0.0),)
        past = past + (inputs,)
    return past


@gluon.jit
def store_tails(taps, weights, past, depth, G: gl.constexpr):
    """Put what reaches into the prompt, the same for all of its beams, into shared memory."""
    for part in gl.static_range(3):
        w = split_taps(weights[part], G)
        x_0 = past[part][0].to(gl.float32)
        x_1 = past[part][1].to(gl.float32)
        x_2 = past[part][2].to(gl.float32)
        # The window's input i lies in the prompt when i + depth < 3, and is its input i + depth.
        oldest = gl.where(depth == 0, x_0, gl.where(depth == 1, x_1, gl.where(depth == 2, x_2, 0.0)))
        middle = gl.where(depth == 0, x_1, gl.where(depth == 1, x_2, 0.0))
        newest = gl.where(depth == 0, x_2, 0.0)
        taps.index(TAILS + part).store(w[0] * oldest + w[1] * middle + w[2] * newest)


@gluon.jit
def convolve(ring, place, n, indices, base, stride, taps, slot, owner, G: gl.constexpr):
    """Sum the windows of v, q and k, through SiLU; record the rows' own inputs and the keys.

    The results lie where the own inputs lay: returns the place of the first, which are yet to be refilled. `slot` is
    as the sums are laid out.
    """
    CONV: gl.constexpr = conv_layout(G.NW)
    CHANNEL: gl.constexpr = gl.SliceLayout(0, CONV)
    PAST: gl.constexpr = G.PAST
    sums = ()
    for part in gl.static_range(3):
        sums = sums + (taps.index(TAILS + part).load(CHANNEL)[None, :],)
    for i in gl.static_range(PAST):
        added = ()
        for part in gl.static_range(3):
            x = widen(load_stages(ring, place, 1, CONV, G)[0])
            place = refill(copy_stage, ring, place, n, indices, base, stride, 3 * i + part, 1, G)
            w = taps.index(part * TAPS + TAPS - 1 - PAST + i).load(CHANNEL)
            added = added + (sums[part] + x * w[None, :],)
        sums = added
    offsets = (slot.to(gl.int64) * G.C)[:, None] + gl.arange(0, 128, layout=CHANNEL)[None, :]
    written = (slot >= 0)[:, None]
    shared = written & owner
    inputs = ()
    if PAST > 0:
        inputs = load_stages(ring, place, 3, CONV, G)
    results = ()
    for part in gl.static_range(3):
        if PAST == 0:
            # The first rows are summed as they come.
            async_copy.wait_group(G.RING - 1 - part)
            inputs = inputs + (ring.index((place + part) % G.RING).load(CONV),)
        w = taps.index(part * TAPS + TAPS - 1).load(CHANNEL)
        scaled = sums[part] + widen(inputs[part]) * w[None, :]
        # Without ancestors a tile waits for exponents and reciprocals above all; with them for its loads.
        if PAST == 0:
            y = scaled_silu_pairs(scaled)
        else:
            y = scaled_silu(scaled)
        results = results + (y.to(gl.bfloat16),)
        gl.store(base[3 + part] + offsets, inputs[part], mask=written if part == 0 else shared)
    for part in gl.static_range(3):
        ring.index((place + part) % G.RING).store(results[part])
    offsets = (slot.to(gl.int64) * G.HK)[:, None] + gl.arange(0, 128, layout=CHANNEL)[None, :]
    gl.store(base[6] + offsets, results[2], mask=shared)
    return place


@gluon.jit
def load_gates(p_a, p_b, n, s_a, s_b, i_hv, end):
    """Raw decay and write strength of the rows n; zeros past the end."""
    a = gl.load(p_a + n.to(gl.int64) * s_a + i_hv, mask=n < end, other=0.0)
    b = gl.load(p_b + n.to(gl.int64) * s_b + i_hv, mask=n < end, other=0.0)
    return a, b


@gluon.jit
def gates(a, b, rate, bias):
    """The log decay and the write strength of rows, from their raw values."""
    x = a.to(gl.float32) + bias
    return rate * (gl.maximum(x, 0.0) + gl.log(1.0 + gl.exp(-gl.abs(x)))), sigmoid(b.to(gl.float32))


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
    CONV: gl.constexpr = conv_layout(NW)
    ROW: gl.constexpr = gl.SliceLayout(1, PIECE)
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[NW, 1], instr_shape=[16, 128, 16]
    )
    DOT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dots_layout(NW), k_width=2)
    STATE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
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

    WEIGHTS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    taps = gl.allocate_shared_memory(gl.float32, [TAILS + 3, 128], WEIGHTS)
    b_norm = gl.allocate_shared_memory(p_norm_weight.dtype.element_ty, [1, 128], WEIGHTS)

    # First channels of this program's v, q and k.
    channels = (2 * G.HK + i_hv * 128, i_h * 128, G.HK + i_h * 128)
    column = i_hv * 128
    base = (
        p_x + channels[0],
        p_x + channels[1],
        p_x + channels[2],
        p_records_x + channels[0],
        p_records_x + channels[1],
        p_records_x + channels[2],
        p_records_k + i_h * 128,
        p_records_delta + column,
        p_z + column,
    )
    # The first tile's rows, if the kernel before this one has not just written them, come from memory early.
    n = first + gl.arange(0, BW, layout=ROW)
    for part in gl.static_range(3):
        prefetch_rows(base[part], n.to(gl.int64) * s_x, n < last, 32, G)
    prefetch_rows(base[8], n.to(gl.int64) * s_z, n < last, 32, G)
    requests = gl.arange(0, BPAD, layout=REQUESTS)
    ends = gl.load(p_cu_rows + 1 + requests, mask=requests < B, other=FAR).to(gl.int32)
    prompts = gl.load(p_prompts + requests, mask=requests < B, other=-1).to(gl.int32)
    rate = -gl.exp(gl.load(p_A_log + i_hv).to(gl.float32))
    bias = gl.load(p_dt_bias + i_hv).to(gl.float32)
    store_taps(taps, load_taps(p_weight, channels, G), G)
    lanes = gl.arange(0, 128, layout=channel_layout(G))
    b_norm.index(0).store(gl.load(p_norm_weight + lanes))

    start = first
    while start < last:
        request, end, prompt = request_at(start, last, ends, requests, prompts)
        live = prompt >= 0
        live_end = gl.where(live, end, start)
        stride = (s_x.to(gl.int64), s_z.to(gl.int64), live_end)

        p_block = p_state + (gl.maximum(prompt, 0).to(gl.int64) * HV + i_hv) * (2 * 128 * 128)
        copy_state(state, p_block, live, 128, 128, NW)
        depth = gl.to_tensor(0)
        if T > 0:
            depth = gl.load(p_depths + request, mask=live, other=0).to(gl.int32)
        p_tail = p_conv_state + gl.maximum(prompt, 0).to(gl.int64) * (G.C * (TAPS - 1))
        past = load_past(p_tail, channels, live, G)
        weights = load_taps(p_weight, channels, G)
        # A request of fewer ancestors than T has them at the end of its index.
        shift = depth - T
        n = start + gl.arange(0, BW, layout=ROW)
        index = load_index(p_slots, p_ancestors, s_ancestors, shift, n, live_end, T)
        index_1 = load_index(p_slots, p_ancestors, s_ancestors, shift, n + BW, live_end, T)
        index_2 = index_1
        if REACH == 2:
            index_2 = load_index(p_slots, p_ancestors, s_ancestors, shift, n + 2 * BW, live_end, T)
        store_tails(taps, weights, past, depth, G)
        # All that comes from the prompt, and the indices, are loaded while the kernel before this one drains. The fence
        # waits for whatever is on its way, so it comes before the copies of the first rows.
        if start == first:
            if OVERLAP:
                gdc_launch_dependents()
            async_copy.wait_group(0)
            fence_async_shared()
            gl.thread_barrier()
            if OVERLAP:
                gdc_wait()
        a_0, b_0 = load_gates(p_a, p_b, n, s_a, s_b, i_hv, live_end)
        a_1, b_1 = load_gates(p_a, p_b, n + BW, s_a, s_b, i_hv, live_end)
        for s in gl.static_range(RING):
            copy_ahead(copy_stage, ring, s, n, (index, index_1), base, stride, s, G)
        if start > first:
            async_copy.wait_group(RING)
            fence_async_shared()
            gl.thread_barrier()

        b_g, b_beta = gates(a_0, b_0, rate, bias)
        place = gl.to_tensor(0)
        for _ in range(gl.cdiv(end - start, BW)):
            indices = (index, index_1, index_2)
            if RING == G.STAGES:
                # A stage then has a place of its own, known when this is compiled.
                place = gl.to_tensor(0)
            slot_conv = gl.convert_layout(index[0], gl.SliceLayout(1, CONV))
            place = convolve(ring, place, n, indices, base, stride, taps, slot_conv, owner, G)
            v = ring.index(place).load(PIECE)
            xq = ring.index((place + 1) % RING).load(OPERAND)
            xk = ring.index((place + 2) % RING).load(OPERAND)
            for part in gl.static_range(3):
                place = refill(copy_stage, ring, place, n, indices, base, stride, G.OWN + part, 1, G)

            # One product for both: a warp's tile is [8 rows of q; 8 rows of k]. The small ones come first, or they
            # would wait for it.
            a = gl.join(xq.reshape([NW, 8, 128]), xk.reshape([NW, 8, 128])).permute(0, 3, 1, 2)
            operand = gl.convert_layout(a.reshape([2 * BW, 128]), DOT, assert_trivial=True)
            lefts = (gl.convert_layout(a.reshape([NW, 16, 128]), LEFT, assert_trivial=True),)
            qq, _kq = key_dots(lefts, (xq,), 1, NW)
            qk, kk = key_dots(lefts, (xk,), 1, NW)
            acc = product((operand,), state, BW, 1, MMA)

            # A tile's index is loaded one tile before its first copy starts, its raw gates two tiles ahead. Behind the
            # wait for the product, or what is computed before it shares a scoreboard with the loads and waits for
            # memory; with more ancestors that would take registers, and they wait for memory anyway.
            n_3 = n + (REACH + 1) * BW
            if T > 1:
                g_1, beta_1 = gates(a_1, b_1, rate, bias)
                index_3 = load_index(p_slots, p_ancestors, s_ancestors, shift, n_3, live_end, T)
                a_1, b_1 = load_gates(p_a, p_b, n + 2 * BW, s_a, s_b, i_hv, live_end)

            q_scale = scale * gl.rsqrt(qq + L2NORM_EPS)
            k_scale = gl.rsqrt(kk + L2NORM_EPS)
            qk = qk * q_scale
            b_z = load_stages(ring, place, 1, PIECE, G)[0]
            place = refill(copy_stage, ring, place, n, indices, base, stride, G.GATE, 1, G)
            if T == 0:
                gate = silu_by_tanh(b_z)
            elif T == 1:
                gate = silu(b_z)
            decays = load_decays(p_records_g, index, i_hv, HV, T)
            coefficients = ()
            for j in gl.static_range(T):
                keys = load_stages(ring, place, 1, OPERAND, G)
                place = refill(copy_stage, ring, place, n, indices, base, stride, G.KEYS + j, 1, G)
                coefficients = coefficients + key_dots(lefts, keys, 1, NW)
            fades, fade = suffix_decays(b_g, decays, T)

            acc, _a = warpgroup_mma_wait(0, deps=[acc, operand])
            if T <= 1:
                g_1, beta_1 = gates(a_1, b_1, rate, bias)
                index_3 = load_index(p_slots, p_ancestors, s_ancestors, shift, n_3, live_end, T)
                a_1, b_1 = load_gates(p_a, p_b, n + 2 * BW, s_a, s_b, i_hv, live_end)
            uq, uk = take_apart(acc, BW, NW)
            uq = uq * (q_scale * fade)[:, None]
            uk = uk * (k_scale * fade)[:, None]
            for j in gl.static_range(T):
                delta = load_delta(ring, place, G)
                for i in gl.static_range(DS):
                    place = refill(
                        copy_stage, ring, place, n, indices, base, stride, G.DELTAS + j * DS + i, 1, G
                    )
                fade = fades[T - 1 - j]
                uq += delta * (coefficients[2 * j] * q_scale * fade)[:, None]
                uk += delta * (coefficients[2 * j + 1] * k_scale * fade)[:, None]
            # As it is recorded, over the key's length.
            delta = (b_beta * k_scale)[:, None] * (widen(v) - uk)
            b_o = uq + delta * qk[:, None]
            if T > 1:
                gate = silu(b_z)
            slot = index[0].to(gl.int64)
            out = gl.arange(0, 128, layout=gl.SliceLayout(0, PIECE))
            written = (slot >= 0)[:, None]
            b_o = gated_norm(b_o, gate, b_norm.index(0).load(gl.SliceLayout(0, PIECE)), norm_eps, 128)
            keep, b_o = gl.broadcast(gl.where(slot >= 0, -1, 0)[:, None], b_o.to(gl.bfloat16))
            p_rows = p_o + (n.to(gl.int64) * G.HVV + column)[:, None] + out[None, :]
            gl.store(p_rows, keep_rows(b_o, keep), mask=(n < end)[:, None])
            p_rows = p_records_delta + column + (slot * G.HVV)[:, None] + out[None, :]
            gl.store(p_rows, delta.to(p_records_delta.dtype.element_ty), mask=written)
            gl.store(p_records_g + slot * HV + i_hv, b_g, mask=slot >= 0)
            n += BW
            b_g = g_1
            b_beta = beta_1
            index = index_1
            if REACH == 2:
                index_1 = index_2
                index_2 = index_3
            else:
                index_1 = index_3
        # The next request's state goes where this one's lies: every warp must be done with it.
        async_copy.wait_group(0)
        gl.thread_barrier()
        start = end
