"""Projection replay for Hopper (Gluon): one program replays some beams of one value head and 128 of its columns.

The prompt's state block stays in shared memory as two bf16 halves. Everything else streams through one ring of
`[BW, 128]` stages filled by asynchronous copies, in the order q, k, keys of the ancestors, deltas of the ancestors, v:
the dot products come while the product with the state runs, and the updates after it.

A warp works on 8 rows, as the 16 rows [8 of q; 8 of k] of its tensor core tiles, and a thread on a part of one row:
nothing is exchanged between warps. The dot products with an ancestor's keys are the diagonal of a small product
`[8 q; 8 k] x [8 keys]`: seven eighths of it are thrown away, and it is still far cheaper than multiplying by hand. Rows
of the state are permuted on their way into shared memory, so that a thread's accumulator columns are the 16-byte pieces
in which it reads `delta` and `v` and writes `o`.

A row that must not be read is copied as zeros: padding needs no branch.
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

from onela.ops.gated_delta._replay_hopper_layouts import (
    dots_layout,
    geometry,
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
    prefetch,
    prefetch_rows,
    product,
    refill,
    request_at,
    silu,
    suffix_decays,
    take_apart,
    widen,
)


@gluon.jit
def copy_stage(ring, place, n, index, base, stride, S: gl.constexpr, G: gl.constexpr):
    """Start the copy of stage S of the tile of rows n; index holds their slots, then their ancestors' slots."""
    PIECE: gl.constexpr = piece_layout(G.NW)
    dst = ring.index(place)
    if S < G.KB:
        copy_rows(dst, base[0] + S * 128, n.to(gl.int64) * stride[0], index[0] >= 0, PIECE)
    elif S < G.KEYS:
        if G.RAW:
            copy_rows(dst, base[3] + (S - G.KB) * 128, index[0].to(gl.int64) * G.HK, index[0] >= 0, PIECE)
        else:
            copy_rows(dst, base[1] + (S - G.KB) * 128, n.to(gl.int64) * stride[1], index[0] >= 0, PIECE)
    elif S < G.DELTAS:
        at = index[1 + (S - G.KEYS) // G.KB]
        copy_rows(dst, base[3] + (S - G.KEYS) % G.KB * 128, at.to(gl.int64) * G.HK, at >= 0, PIECE)
    elif S < G.LAST:
        at = index[1 + (S - G.DELTAS) // G.DS]
        if G.DS == 1:
            copy_rows(dst, base[4], at.to(gl.int64) * G.HVV, at >= 0, PIECE)
        else:
            copy_half_rows(dst, base[4], at, (S - G.DELTAS) % 2, G)
    elif S == G.LAST:
        copy_rows(dst, base[2], n.to(gl.int64) * stride[2], index[0] >= 0, PIECE)
    else:
        copy_rows(dst, base[5], n.to(gl.int64) * stride[3], index[0] >= 0, PIECE)


@gluon.jit
def load_index(p_slots, p_ancestors, s_ancestors, n, end, T: gl.constexpr):
    """Slots of the rows n and of their ancestors; PAD for rows that are padding or lie past the end."""
    slot = gl.load(p_slots + n, mask=n < end, other=-1)
    index = (slot,)
    for j in gl.static_range(T):
        at = gl.load(p_ancestors + n.to(gl.int64) * s_ancestors + j, mask=n < end, other=-1)
        index = index + (gl.where(slot >= 0, at, -1),)
    return index


@gluon.jit
def prefetch_decays(p_records_g, index, i_hv, HV: gl.constexpr, T: gl.constexpr):
    """The log decays of all ancestors of a tile: they are loaded where nothing else would cover the way to memory."""
    for j in gl.static_range(T):
        at = index[1 + j]
        prefetch(p_records_g + at.to(gl.int64) * HV + i_hv, at >= 0)


@gluon.jit
def prefetch_tile(n, index, base, stride, G: gl.constexpr):
    """Everything of a tile but its gates: what the kernel before this one has not written comes from memory early."""
    T: gl.constexpr = G.T
    KB: gl.constexpr = G.KB
    DS: gl.constexpr = G.DS
    live = index[0] >= 0
    for b in gl.static_range(KB):
        prefetch_rows(base[0] + b * 128, n.to(gl.int64) * stride[0], live, 32, G)
        if G.RAW:
            prefetch_rows(base[3] + b * 128, index[0].to(gl.int64) * G.HK, live, 32, G)
        else:
            prefetch_rows(base[1] + b * 128, n.to(gl.int64) * stride[1], live, 32, G)
    for j in gl.static_range(T):
        at = index[1 + j]
        for b in gl.static_range(KB):
            prefetch_rows(base[3] + b * 128, at.to(gl.int64) * G.HK, at >= 0, 32, G)
        for b in gl.static_range(DS):
            prefetch_rows(base[4] + b * 64, at.to(gl.int64) * G.HVV, at >= 0, 32 // DS, G)
    prefetch_rows(base[2], n.to(gl.int64) * stride[2], live, 32, G)


@gluon.jit
def live_gates(b_g, b_beta, slot):
    """The gates of the rows that have a slot, zeros for padding: there they may be anything."""
    return gl.where(slot >= 0, b_g, 0.0), gl.where(slot >= 0, b_beta, 0.0)


@gluon.jit(do_not_specialize=["N", "B", "rows_per_program", "s_g", "s_beta", "s_ancestors"])
def gated_delta_replay_hopper_kernel(
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
    p_z,
    p_norm_weight,
    p_o,
    N,
    B,
    rows_per_program,
    scale,
    norm_eps,
    s_q,
    s_k,
    s_v,
    s_z,
    s_g,
    s_beta,
    s_ancestors,
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    T: gl.constexpr,
    BPAD: gl.constexpr,
    NW: gl.constexpr,
    RING: gl.constexpr,
    RAW: gl.constexpr,
    WRITE: gl.constexpr,
    NORM: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    DS: gl.constexpr = 1 if p_records_delta.dtype.element_ty == gl.bfloat16 else 2
    G: gl.constexpr = geometry(H, HV, K, V, T, NW, RING, RAW, DS, NORM)
    BW: gl.constexpr = G.BW
    KB: gl.constexpr = G.KB
    REACH: gl.constexpr = G.REACH
    VB: gl.constexpr = G.VB
    PIECE: gl.constexpr = piece_layout(NW)
    OPERAND: gl.constexpr = operand_layout(NW)
    ROW: gl.constexpr = gl.SliceLayout(1, PIECE)
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[NW, 1], instr_shape=[16, 128, 16]
    )
    DOT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    STATE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    REQUESTS: gl.constexpr = gl.BlockedLayout([BPAD // 32], [32], [NW], [0])

    pid = gl.program_id(0)
    i_v = pid % VB
    i_hv = pid // VB % HV
    i_h = i_hv // (HV // H)
    first = (pid // (VB * HV)) * rows_per_program
    last = gl.minimum(first + rows_per_program, N)

    state = gl.allocate_shared_memory(gl.bfloat16, [2 * KB, 128, 128], STATE)
    ring = gl.allocate_shared_memory(gl.bfloat16, [RING, BW, 128], row_image(NW))

    column = i_hv * V + i_v * 128
    p_ks, p_deltas = p_records_k + i_h * K, p_records_delta + column
    base = (p_q + i_h * K, p_k + i_h * K, p_v + column, p_ks, p_deltas, p_z + column)
    stride = (s_q.to(gl.int64), s_k.to(gl.int64), s_v.to(gl.int64), s_z.to(gl.int64))
    requests = gl.arange(0, BPAD, layout=REQUESTS)
    ends = gl.load(p_cu_rows + 1 + requests, mask=requests < B, other=FAR).to(gl.int32)
    prompts = gl.load(p_prompts + requests, mask=requests < B, other=-1).to(gl.int32)

    start = first
    while start < last:
        _request, end, prompt = request_at(start, last, ends, requests, prompts)
        live_end = gl.where(prompt >= 0, end, start)
        p_block = p_state + (gl.maximum(prompt, 0).to(gl.int64) * HV + i_hv) * (2 * V * K) + i_v * (128 * K)
        copy_state(state, p_block, prompt >= 0, K, V, NW)
        n = start + gl.arange(0, BW, layout=ROW)
        index = load_index(p_slots, p_ancestors, s_ancestors, n, live_end, T)
        index_1 = load_index(p_slots, p_ancestors, s_ancestors, n + BW, live_end, T)
        index_2 = index_1
        if REACH == 2:
            index_2 = load_index(p_slots, p_ancestors, s_ancestors, n + 2 * BW, live_end, T)
        prefetch_decays(p_records_g, index, i_hv, HV, T)
        # The state and all indices are loaded while the kernel before this one drains; the first rows are on their way.
        if OVERLAP:
            if start == first:
                prefetch_tile(n, index, base, stride, G)
            if start == first:
                gdc_launch_dependents()
                gdc_wait()
        b_g = gl.load(p_g + n.to(gl.int64) * s_g + i_hv, mask=n < live_end, other=0.0)
        b_beta = gl.load(p_beta + n.to(gl.int64) * s_beta + i_hv, mask=n < live_end, other=0.0)
        b_g, b_beta = live_gates(b_g, b_beta, index[0])
        for s in gl.static_range(RING):
            copy_ahead(copy_stage, ring, s, n, (index, index_1), base, stride, s, G)
        async_copy.wait_group(RING)
        fence_async_shared()
        gl.thread_barrier()

        place = 0
        for _ in range(gl.cdiv(end - start, BW)):
            # A tile's index is loaded one tile before its first copy starts.
            index_3 = load_index(p_slots, p_ancestors, s_ancestors, n + (REACH + 1) * BW, live_end, T)
            if REACH == 1:
                index_2 = index_3
            prefetch_decays(p_records_g, index_1, i_hv, HV, T)
            indices = (index, index_1, index_2)
            more = n + BW < live_end
            g_1 = gl.load(p_g + (n + BW).to(gl.int64) * s_g + i_hv, mask=more, other=0.0)
            beta_1 = gl.load(p_beta + (n + BW).to(gl.int64) * s_beta + i_hv, mask=more, other=0.0)

            rows = load_stages(ring, place, 2 * KB, OPERAND, G)
            xq = rows[:KB]
            xk = rows[KB:]
            if WRITE and not RAW:
                if i_hv % (HV // H) == 0 and i_v == 0:
                    for b in gl.static_range(KB):
                        key = ring.index((place + KB + b) % RING).load(PIECE)
                        out = gl.arange(0, 128, layout=gl.SliceLayout(0, PIECE))
                        p_key = base[3] + b * 128 + (index[0].to(gl.int64) * G.HK)[:, None] + out[None, :]
                        gl.store(p_key, key, mask=(index[0] >= 0)[:, None])
            place = refill(copy_stage, ring, place, n, indices, base, stride, 0, 2 * KB, G)
            # One product for both: a warp's tile is [8 rows of q; 8 rows of k].
            operands = ()
            for b in gl.static_range(KB):
                a = gl.join(xq[b].reshape([NW, 8, 128]), xk[b].reshape([NW, 8, 128]))
                a = a.permute(0, 3, 1, 2).reshape([2 * BW, 128])
                operands = operands + (gl.convert_layout(a, DOT, assert_trivial=True),)
            acc = product(operands, state, BW, KB, MMA)
            LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dots_layout(NW), k_width=2)
            lefts = ()
            for b in gl.static_range(KB):
                a = gl.join(xq[b].reshape([NW, 8, 128]), xk[b].reshape([NW, 8, 128]))
                a = a.permute(0, 3, 1, 2).reshape([NW, 16, 128])
                lefts = lefts + (gl.convert_layout(a, LEFT, assert_trivial=True),)
            qq, _kq = key_dots(lefts, xq, KB, NW)
            qk, kk = key_dots(lefts, xk, KB, NW)
            q_scale = scale * gl.rsqrt(qq + L2NORM_EPS)
            k_scale = gl.rsqrt(kk + L2NORM_EPS)
            qk = qk * q_scale * k_scale

            decays = load_decays(p_records_g, index, i_hv, HV, T)
            coefficients = ()
            for j in gl.static_range(T):
                keys = load_stages(ring, place, KB, OPERAND, G)
                place = refill(copy_stage, ring, place, n, indices, base, stride, G.KEYS + j * KB, KB, G)
                coefficients = coefficients + key_dots(lefts, keys, KB, NW)
            fades, fade = suffix_decays(b_g, decays, T)

            if KB == 1:
                acc, _a = warpgroup_mma_wait(0, deps=[acc, operands[0]])
            else:
                acc, _a, _b = warpgroup_mma_wait(0, deps=[acc, operands[0], operands[1]])
            uq, uk = take_apart(acc, BW, NW)
            uq = uq * (q_scale * fade)[:, None]
            uk = uk * (k_scale * fade)[:, None]
            for j in gl.static_range(T):
                delta = load_delta(ring, place, G)
                place = refill(copy_stage, ring, place, n, indices, base, stride, G.DELTAS + j * DS, DS, G)
                fade = fades[T - 1 - j]
                uq += delta * (coefficients[2 * j] * q_scale * fade)[:, None]
                uk += delta * (coefficients[2 * j + 1] * k_scale * fade)[:, None]
            b_v = widen(load_stages(ring, place, 1, PIECE, G)[0])
            place = refill(copy_stage, ring, place, n, indices, base, stride, G.LAST, 1, G)
            delta = b_beta[:, None] * (b_v - uk)
            b_o = uq + delta * qk[:, None]
            out = gl.arange(0, 128, layout=gl.SliceLayout(0, PIECE))
            if NORM:
                b_weight = gl.load(p_norm_weight + out)
                b_z = load_stages(ring, place, 1, PIECE, G)[0]
                place = refill(copy_stage, ring, place, n, indices, base, stride, G.LAST + 1, 1, G)
                b_o = gated_norm(b_o, silu(b_z), b_weight, norm_eps, V)
            p_rows = p_o + (n.to(gl.int64) * G.HVV + column)[:, None] + out[None, :]
            gl.store(p_rows, b_o.to(p_o.dtype.element_ty), mask=(n < end)[:, None])
            if WRITE:
                slot = index[0]
                p_rows = base[4] + (slot.to(gl.int64) * G.HVV)[:, None] + out[None, :]
                b_record = (delta * k_scale[:, None]).to(p_records_delta.dtype.element_ty)
                gl.store(p_rows, b_record, mask=(slot >= 0)[:, None])
                if i_v == 0:
                    gl.store(p_records_g + slot.to(gl.int64) * HV + i_hv, b_g, mask=slot >= 0)
            n += BW
            b_g, b_beta = live_gates(g_1, beta_1, index_1[0])
            index = index_1
            index_1 = index_2
            if REACH == 2:
                index_2 = index_3
        # The next request's state goes where this one's lies: every warp must be done with it.
        async_copy.wait_group(0)
        gl.thread_barrier()
        start = end
