"""Projection replay for Hopper (Gluon): one program replays some beams of one value head and 128 of its columns.

The prompt's state block stays in shared memory as two bf16 halves. Everything else streams through one ring of
`[BW, 128]` stages filled by asynchronous copies, in the order q, k, keys of the ancestors, deltas of the ancestors, v:
the dot products come before the product with the state is waited for, and the updates after it.

A thread owns one row (two in the tensor core's tile: its q and its k), so nothing is exchanged between warps. Rows of the
state are permuted on their way into shared memory, so that a thread's accumulator columns are the 16-byte pieces in which
it reads `delta` and `v` and writes `o`.

A row that must not be read is copied as zeros: padding needs no branch.
"""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

L2NORM_EPS = gl.constexpr(1e-6)
FAR = gl.constexpr(2147483647)


@dataclass(frozen=True)
class Geometry:
    """Sizes, and the ring's stages of one tile: q and k up to KEYS, the keys up to DELTAS, the deltas up to LAST, v."""

    H: int
    HV: int
    K: int
    V: int
    T: int
    NW: int
    RING: int
    RAW: bool
    DS: int
    """Stages of a delta row: two when it is fp32."""

    def __post_init__(self):
        put = object.__setattr__
        put(self, "BW", 8 * self.NW)
        put(self, "KB", self.K // 128)
        put(self, "VB", self.V // 128)
        put(self, "HK", self.H * self.K)
        put(self, "HVV", self.HV * self.V)
        put(self, "KEYS", 2 * self.KB)
        put(self, "DELTAS", self.KEYS + self.T * self.KB)
        put(self, "LAST", self.DELTAS + self.T * self.DS)
        put(self, "STAGES", self.LAST + 1)
        # Tiles ahead of the present one that a copy may belong to.
        put(self, "REACH", (self.RING + self.LAST) // self.STAGES)


@gluon.constexpr_function
def geometry(H, HV, K, V, T, NW, RING, RAW, DS):
    return Geometry(H, HV, K, V, T, NW, RING, RAW, DS)


@gluon.constexpr_function
def warp_bases(NW):
    return {4: [[8, 0], [16, 0]], 8: [[8, 0], [16, 0], [32, 0]]}[NW]


@gluon.constexpr_function
def piece_layout(NW):
    """Thread (row, c): columns 32 i + 8 c + (0..7), four pieces of 16 bytes."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [0, 64]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=warp_bases(NW),
        block_bases=[],
        shape=[8 * NW, 128],
    )


@gluon.constexpr_function
def half_copy_layout(NW):
    """Half of an fp32 row, 64 columns, as it is copied: thread (row, c) has columns 16 i + 4 c + (0..3)."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 16], [0, 32]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=warp_bases(NW),
        block_bases=[],
        shape=[8 * NW, 64],
    )


@gluon.constexpr_function
def half_piece_layout(NW):
    """The same half as it is read: two of piece_layout's four pieces."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=warp_bases(NW),
        block_bases=[],
        shape=[8 * NW, 64],
    )


@gluon.constexpr_function
def operand_layout(NW):
    """Thread (row, c): columns 8 b + 2 c + (0, 1), the tensor core's operand fragment."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 8], [0, 16], [0, 32], [0, 64]],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=warp_bases(NW),
        block_bases=[],
        shape=[8 * NW, 128],
    )


@gluon.constexpr_function
def row_image(NW):
    """[warp][i][row][c ^ row / 2][8]: the 64 bytes that four threads copy of a row stay together, or the copy engine
    splits them and fetches sectors twice; and neither copies, nor ldmatrix (8 rows of one piece), nor 16-byte reads
    conflict in a bank."""
    bases = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [1, 0], [2, 8], [4, 16], [0, 32], [0, 64]]
    return gl.SharedLinearLayout(bases + warp_bases(NW))


@gluon.constexpr_function
def half_image(NW):
    """row_image for fp32."""
    bases = [[0, 1], [0, 2], [0, 4], [0, 8], [1, 0], [2, 4], [4, 8], [0, 16], [0, 32]]
    return gl.SharedLinearLayout(bases + warp_bases(NW))


@gluon.jit
def copy_rows(dst, p_base, offset, live, LAYOUT: gl.constexpr):
    cols = gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT))
    async_copy.async_copy_global_to_shared(dst, p_base + offset[:, None] + cols[None, :], mask=live[:, None])


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
            HALF: gl.constexpr = half_copy_layout(G.NW)
            dst = dst._reinterpret(gl.float32, [G.BW, 64], half_image(G.NW))
            cols = gl.arange(0, 64, layout=gl.SliceLayout(0, HALF)) + (S - G.DELTAS) % 2 * 64
            at = gl.convert_layout(at, gl.SliceLayout(1, HALF), assert_trivial=True)
            p_rows = base[4] + (at.to(gl.int64) * G.HVV)[:, None] + cols[None, :]
            async_copy.async_copy_global_to_shared(dst, p_rows, mask=(at >= 0)[:, None])
    else:
        copy_rows(dst, base[2], n.to(gl.int64) * stride[2], index[0] >= 0, PIECE)


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
def load_index(p_slots, p_ancestors, s_ancestors, n, end, T: gl.constexpr):
    """Slots of the rows n and of their ancestors; PAD for rows that are padding or lie past the end."""
    slot = gl.load(p_slots + n, mask=n < end, other=-1)
    index = (slot,)
    for j in gl.static_range(T):
        at = gl.load(p_ancestors + n.to(gl.int64) * s_ancestors + j, mask=n < end, other=-1)
        index = index + (gl.where(slot >= 0, at, -1),)
    return index


@gluon.jit
def product(operands, state, BW: gl.constexpr, KB: gl.constexpr, MMA: gl.constexpr):
    """Start the rows' product with both halves of the state block."""
    acc = gl.zeros([2 * BW, 128], gl.float32, MMA)
    for half in gl.static_range(2):
        for b in gl.static_range(KB):
            block = state.index(half * KB + b).permute((1, 0))
            acc = warpgroup_mma(operands[b], block, acc, use_acc=half + b > 0, is_async=True)
    return acc


@gluon.jit
def to_pieces(u, BW: gl.constexpr, NW: gl.constexpr):
    """Accumulator columns, whose order is that of the state's rows in shared memory, to piece_layout: registers only."""
    u = u.reshape([BW, 4, 4, 4, 2]).permute(0, 1, 3, 2, 4).reshape([BW, 128])
    return gl.convert_layout(u, piece_layout(NW), assert_trivial=True)


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
    p_o,
    N,
    B,
    rows_per_program,
    scale,
    s_q,
    s_k,
    s_v,
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
    LATE: gl.constexpr,
    RAW: gl.constexpr,
    WRITE: gl.constexpr,
    PDL: gl.constexpr,
):
    DS: gl.constexpr = 1 if p_records_delta.dtype.element_ty == gl.bfloat16 else 2
    G: gl.constexpr = geometry(H, HV, K, V, T, NW, RING, RAW, DS)
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
    STATE_COPY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [NW, 1], [1, 0])
    REQUESTS: gl.constexpr = gl.BlockedLayout([BPAD // 32], [32], [NW], [0])

    pid = gl.program_id(0)
    i_v = pid % VB
    i_hv = pid // VB % HV
    i_h = i_hv // (HV // H)
    first = (pid // (VB * HV)) * rows_per_program
    last = gl.minimum(first + rows_per_program, N)

    state = gl.allocate_shared_memory(gl.bfloat16, [2 * KB, 128, 128], STATE)
    ring = gl.allocate_shared_memory(gl.bfloat16, [RING, BW, 128], row_image(NW))
    if PDL:
        gdc_launch_dependents()
        gdc_wait()

    column = i_hv * V + i_v * 128
    base = (p_q + i_h * K, p_k + i_h * K, p_v + column, p_records_k + i_h * K, p_records_delta + column)
    stride = (s_q.to(gl.int64), s_k.to(gl.int64), s_v.to(gl.int64))
    requests = gl.arange(0, BPAD, layout=REQUESTS)
    ends = gl.load(p_cu_rows + 1 + requests, mask=requests < B, other=FAR).to(gl.int32)
    prompts = gl.load(p_prompts + requests, mask=requests < B, other=-1).to(gl.int32)

    start = first
    while start < last:
        # The rows [start, end) belong to one request, or lie past the last one (then its prompt is PAD).
        end = gl.minimum(gl.min(gl.where(ends > start, ends, FAR), axis=0), last)
        request = gl.sum((ends <= start).to(gl.int32), axis=0)
        prompt = gl.max(gl.where(requests == request, prompts, -1), axis=0)
        live_end = gl.where(prompt >= 0, end, start)

        n = start + gl.arange(0, BW, layout=ROW)
        index = load_index(p_slots, p_ancestors, s_ancestors, n, live_end, T)
        index_1 = load_index(p_slots, p_ancestors, s_ancestors, n + BW, live_end, T)
        index_2 = index_1
        if REACH == 2:
            index_2 = load_index(p_slots, p_ancestors, s_ancestors, n + 2 * BW, live_end, T)
        b_g = gl.load(p_g + n * s_g + i_hv, mask=n < live_end, other=0.0)
        b_beta = gl.load(p_beta + n * s_beta + i_hv, mask=n < live_end, other=0.0)

        v_rows = gl.arange(0, 128, layout=gl.SliceLayout(1, STATE_COPY))
        v_rows = v_rows // 32 * 32 + v_rows // 2 % 4 * 8 + v_rows // 8 % 4 * 2 + v_rows % 2
        cols = gl.arange(0, 128, layout=gl.SliceLayout(0, STATE_COPY))
        p_block = p_state + (gl.maximum(prompt, 0).to(gl.int64) * HV + i_hv) * (2 * V * K) + i_v * (128 * K)
        for half in gl.static_range(2):
            for b in gl.static_range(KB):
                async_copy.async_copy_global_to_shared(
                    state.index(half * KB + b),
                    p_block + (half * V * K + b * 128) + (v_rows * K)[:, None] + cols[None, :],
                    mask=(v_rows >= 0)[:, None] & (prompt >= 0),
                )
        async_copy.commit_group()
        for s in gl.static_range(RING):
            copy_ahead(ring, s, n, (index, index_1), base, stride, s, G)
        async_copy.wait_group(RING)
        fence_async_shared()
        gl.thread_barrier()

        place = 0
        for _ in range(gl.cdiv(end - start, BW)):
            # A tile's index is loaded one tile before its first copy starts.
            index_3 = load_index(p_slots, p_ancestors, s_ancestors, n + (REACH + 1) * BW, live_end, T)
            if REACH == 1:
                index_2 = index_3
            indices = (index, index_1, index_2)
            more = n + BW < live_end
            g_1 = gl.load(p_g + (n + BW) * s_g + i_hv, mask=more, other=0.0)
            beta_1 = gl.load(p_beta + (n + BW) * s_beta + i_hv, mask=more, other=0.0)

            xq = ()
            for b in gl.static_range(KB):
                async_copy.wait_group(RING - 1)
                xq = xq + (ring.index(place).load(OPERAND),)
                place = refill(ring, place, n, indices, base, stride, b, G)
            xk = ()
            for b in gl.static_range(KB):
                async_copy.wait_group(RING - 1)
                xk = xk + (ring.index(place).load(OPERAND),)
                if WRITE and not RAW:
                    if i_hv % (HV // H) == 0 and i_v == 0:
                        key = ring.index(place).load(PIECE)
                        out = gl.arange(0, 128, layout=gl.SliceLayout(0, PIECE))
                        p_key = base[3] + b * 128 + (index[0].to(gl.int64) * G.HK)[:, None] + out[None, :]
                        gl.store(p_key, key, mask=(index[0] >= 0)[:, None])
                place = refill(ring, place, n, indices, base, stride, KB + b, G)
            # One product for both: a warp's tile is [8 rows of q; 8 rows of k].
            operands = ()
            for b in gl.static_range(KB):
                a = gl.join(xq[b].reshape([NW, 8, 128]), xk[b].reshape([NW, 8, 128]))
                a = a.permute(0, 3, 1, 2).reshape([2 * BW, 128])
                operands = operands + (gl.convert_layout(a, DOT, assert_trivial=True),)
            if not LATE:
                acc = product(operands, state, BW, KB, MMA)
            qq = gl.zeros([BW], gl.float32, gl.SliceLayout(1, OPERAND))
            kk = qq
            qk = qq
            for b in gl.static_range(KB):
                q32 = xq[b].to(gl.float32)
                k32 = xk[b].to(gl.float32)
                qq += gl.sum(q32 * q32, axis=1)
                kk += gl.sum(k32 * k32, axis=1)
                qk += gl.sum(q32 * k32, axis=1)
            q_scale = scale * gl.rsqrt(gl.convert_layout(qq, ROW, assert_trivial=True) + L2NORM_EPS)
            k_scale = gl.rsqrt(gl.convert_layout(kk, ROW, assert_trivial=True) + L2NORM_EPS)
            qk = gl.convert_layout(qk, ROW, assert_trivial=True) * q_scale * k_scale

            decays = ()
            for j in gl.static_range(T):
                at = index[1 + j]
                p_decay = p_records_g + at.to(gl.int64) * HV + i_hv
                decays = decays + (gl.load(p_decay, mask=at >= 0, other=0.0),)
            coefficients = ()
            for j in gl.static_range(T):
                cq = gl.zeros([BW], gl.float32, gl.SliceLayout(1, OPERAND))
                ck = cq
                for b in gl.static_range(KB):
                    async_copy.wait_group(RING - 1)
                    key32 = ring.index(place).load(OPERAND).to(gl.float32)
                    place = refill(ring, place, n, indices, base, stride, G.KEYS + j * KB + b, G)
                    cq += gl.sum(key32 * xq[b].to(gl.float32), axis=1)
                    ck += gl.sum(key32 * xk[b].to(gl.float32), axis=1)
                coefficients = coefficients + (
                    gl.convert_layout(cq, ROW, assert_trivial=True),
                    gl.convert_layout(ck, ROW, assert_trivial=True),
                )
            # Decays as suffix sums of g, so that nothing is ever divided by a decay.
            decay = b_g
            weights = ()
            for i in gl.static_range(T):
                weights = weights + (gl.exp(decay),)
                decay = decay + decays[T - 1 - i]
            decay = gl.exp(decay)

            if LATE:
                acc = product(operands, state, BW, KB, MMA)
            if KB == 1:
                acc, _a = warpgroup_mma_wait(0, deps=[acc, operands[0]])
            else:
                acc, _a, _b = warpgroup_mma_wait(0, deps=[acc, operands[0], operands[1]])
            uq, uk = acc.reshape([NW, 2, 8, 128]).permute(0, 2, 3, 1).split()
            uq = to_pieces(uq.reshape([BW, 128]), BW, NW) * (q_scale * decay)[:, None]
            uk = to_pieces(uk.reshape([BW, 128]), BW, NW) * (k_scale * decay)[:, None]
            for j in gl.static_range(T):
                if DS == 1:
                    async_copy.wait_group(RING - 1)
                    delta = ring.index(place).load(PIECE).to(gl.float32)
                else:
                    async_copy.wait_group(RING - 1)
                    low = ring.index(place)._reinterpret(gl.float32, [BW, 64], half_image(NW))
                    low = low.load(half_piece_layout(NW))
                    place = refill(ring, place, n, indices, base, stride, G.DELTAS + j * 2, G)
                    async_copy.wait_group(RING - 1)
                    high = ring.index(place)._reinterpret(gl.float32, [BW, 64], half_image(NW))
                    high = high.load(half_piece_layout(NW))
                    delta = gl.join(low, high).permute(0, 2, 1).reshape([BW, 128])
                    delta = gl.convert_layout(delta, PIECE, assert_trivial=True)
                place = refill(ring, place, n, indices, base, stride, G.DELTAS + j * DS + DS - 1, G)
                uq += delta * (coefficients[2 * j] * q_scale * weights[T - 1 - j])[:, None]
                uk += delta * (coefficients[2 * j + 1] * k_scale * weights[T - 1 - j])[:, None]
            async_copy.wait_group(RING - 1)
            b_v = ring.index(place).load(PIECE).to(gl.float32)
            place = refill(ring, place, n, indices, base, stride, G.LAST, G)
            delta = b_beta[:, None] * (b_v - uk)
            out = gl.arange(0, 128, layout=gl.SliceLayout(0, PIECE))
            b_o = (uq + delta * qk[:, None]).to(p_o.dtype.element_ty)
            p_rows = p_o + (n.to(gl.int64) * G.HVV + column)[:, None] + out[None, :]
            gl.store(p_rows, b_o, mask=(n < end)[:, None])
            if WRITE:
                slot = index[0]
                p_rows = base[4] + (slot.to(gl.int64) * G.HVV)[:, None] + out[None, :]
                b_record = (delta * k_scale[:, None]).to(p_records_delta.dtype.element_ty)
                gl.store(p_rows, b_record, mask=(slot >= 0)[:, None])
                if i_v == 0:
                    gl.store(p_records_g + slot.to(gl.int64) * HV + i_hv, b_g, mask=slot >= 0)
            n += BW
            b_g = g_1
            b_beta = beta_1
            index = index_1
            index_1 = index_2
            if REACH == 2:
                index_2 = index_3
        # The next request's state goes where this one's lies: every warp must be done with it.
        async_copy.wait_group(0)
        gl.thread_barrier()
        start = end
