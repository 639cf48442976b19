"""What the Hopper kernels that replay have in common (Gluon): the ring of copies, dot products, decays, the norm."""

# ruff: noqa: RUF005  (Gluon has no starred tuples)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mma_v2, warpgroup_mma

from onela.ops.gated_delta._replay_hopper_layouts import (
    dots_layout,
    half_copy_layout,
    half_image,
    half_piece_layout,
    line_layout,
    piece_layout,
)

L2NORM_EPS = gl.constexpr(1e-6)
FAR = gl.constexpr(2147483647)


@gluon.jit
def copy_rows(dst, p_base, offset, live, LAYOUT: gl.constexpr):
    """Start the copy of 128 numbers of each row; zeros where it is not live."""
    cols = gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT))
    p_rows = p_base + offset[:, None] + cols[None, :]
    async_copy.async_copy_global_to_shared(dst, p_rows, mask=live[:, None])


@gluon.jit
def copy_half_rows(dst, p_base, at, half: gl.constexpr, G: gl.constexpr):
    """Half of the fp32 delta rows of the slots `at`."""
    HALF: gl.constexpr = half_copy_layout(G.NW)
    dst = dst._reinterpret(gl.float32, [G.BW, 64], half_image(G.NW))
    cols = gl.arange(0, 64, layout=gl.SliceLayout(0, HALF)) + half * 64
    at = gl.convert_layout(at, gl.SliceLayout(1, HALF), assert_trivial=True)
    p_rows = p_base + (at.to(gl.int64) * G.HVV)[:, None] + cols[None, :]
    async_copy.async_copy_global_to_shared(dst, p_rows, mask=(at >= 0)[:, None])


@gluon.jit
def copy_ahead(COPY: gl.constexpr, ring, place, n, indices, base, stride, S: gl.constexpr, G: gl.constexpr):
    """Start the copy of stage S, counted from the first one of the tile of rows n on into the next two tiles.

    COPY is the kernel's `copy_stage`: which rows a stage holds.
    """
    AT: gl.constexpr = S % G.STAGES
    TILE: gl.constexpr = S // G.STAGES
    COPY(ring, place, n + TILE * G.BW, indices[TILE], base, stride, AT, G)
    async_copy.commit_group()


@gluon.jit
def load_stages(ring, place, COUNT: gl.constexpr, LAYOUT: gl.constexpr, G: gl.constexpr):
    """Wait for the next COUNT stages and read them."""
    async_copy.wait_group(G.RING - COUNT)
    rows = ()
    for i in gl.static_range(COUNT):
        rows = rows + (ring.index((place + i) % G.RING).load(LAYOUT),)
    return rows


@gluon.jit
def widen(x):
    """bf16 to fp32, two at a time: the compiler takes three instructions for two."""
    return gl.inline_asm_elementwise(
        "{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }",
        "=f,=f,r",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def load_delta(ring, place, G: gl.constexpr):
    """The next delta rows, in fp32; an fp32 record has come in two halves."""
    if G.DS == 1:
        delta = widen(load_stages(ring, place, 1, piece_layout(G.NW), G)[0])
    else:
        async_copy.wait_group(G.RING - 2)
        low = ring.index(place)._reinterpret(gl.float32, [G.BW, 64], half_image(G.NW))
        high = ring.index((place + 1) % G.RING)._reinterpret(gl.float32, [G.BW, 64], half_image(G.NW))
        delta = gl.join(low.load(half_piece_layout(G.NW)), high.load(half_piece_layout(G.NW)))
        delta = delta.permute(0, 2, 1).reshape([G.BW, 128])
        delta = gl.convert_layout(delta, piece_layout(G.NW), assert_trivial=True)
    return delta


@gluon.jit
def refill(
    COPY: gl.constexpr,
    ring,
    place,
    n,
    indices,
    base,
    stride,
    S: gl.constexpr,
    COUNT: gl.constexpr,
    G: gl.constexpr,
):
    """Stages S.. have been read: start the copies that are RING stages on in their places. Returns the next place."""
    for i in gl.static_range(COUNT):
        copy_ahead(COPY, ring, (place + i) % G.RING, n, indices, base, stride, S + i + G.RING, G)
    return (place + COUNT) % G.RING


@gluon.jit
def prefetch(p_line, live):
    """Ask for what lies there to be brought to the L2 cache."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [p_line.to(gl.int64), live.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def prefetch_rows(p_base, offset, live, STEP: gl.constexpr, G: gl.constexpr):
    """256 bytes of every row, 64 a thread; STEP is how many elements 64 bytes are."""
    LINE: gl.constexpr = line_layout(G.NW)
    piece = gl.arange(0, 4, layout=gl.SliceLayout(0, LINE))
    offset = gl.convert_layout(offset, gl.SliceLayout(1, LINE), assert_trivial=True)
    live = gl.convert_layout(live, gl.SliceLayout(1, LINE), assert_trivial=True)
    prefetch(p_base + offset[:, None] + piece[None, :] * STEP, live[:, None] & (piece >= 0)[None, :])


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
def dots_operand(x, NW: gl.constexpr):
    """Rows [8 NW, 128] as the right operand of each warp's product: registers only."""
    B: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=dots_layout(NW), k_width=2)
    return gl.convert_layout(x.reshape([NW, 8, 128]).permute(0, 2, 1), B, assert_trivial=True)


@gluon.jit
def row_dots(products, NW: gl.constexpr):
    """The diagonals of each warp's [8 rows of q; 8 rows of k] x [8 rows of x]: q . x and k . x, row by row."""
    ROW: gl.constexpr = gl.SliceLayout(1, piece_layout(NW))
    DOTS: gl.constexpr = dots_layout(NW)
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, DOTS))) % 8
    col = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, DOTS)))
    same = row[None, :][:, :, None] == col[None, :][:, None, :]
    dots = gl.sum(gl.where(same, products, 0.0), axis=2).reshape([NW, 2, 8])
    q_dot, k_dot = dots.permute(0, 2, 1).split()
    q_dot = gl.convert_layout(q_dot.reshape([8 * NW]), ROW, assert_trivial=True)
    k_dot = gl.convert_layout(k_dot.reshape([8 * NW]), ROW, assert_trivial=True)
    return q_dot, k_dot


@gluon.jit
def key_dots(lefts, keys, KB: gl.constexpr, NW: gl.constexpr):
    """q . key and k . key of every row; keys are the K-blocks of one ancestor's keys."""
    products = gl.zeros([NW, 16, 8], gl.float32, dots_layout(NW))
    for b in gl.static_range(KB):
        products = mma_v2(lefts[b], dots_operand(keys[b], NW), products)
    return row_dots(products, NW)


@gluon.jit
def state_rows(LAYOUT: gl.constexpr):
    """Which row of the state goes to each row in shared memory, so that `to_pieces` moves nothing."""
    rows = gl.arange(0, 128, layout=gl.SliceLayout(1, LAYOUT))
    return rows // 32 * 32 + rows // 2 % 4 * 8 + rows // 8 % 4 * 2 + rows % 2


@gluon.jit
def to_pieces(u, BW: gl.constexpr, NW: gl.constexpr):
    """Accumulator columns, in the order of the state's rows in shared memory, to piece_layout: registers only."""
    u = u.reshape([BW, 4, 4, 4, 2]).permute(0, 1, 3, 2, 4).reshape([BW, 128])
    return gl.convert_layout(u, piece_layout(NW), assert_trivial=True)


@gluon.jit
def request_at(start, last, ends, requests, prompts):
    """The request of the row `start`, up to which row it is the program's, and its prompt.

    Rows past the last request are one more, whose prompt is PAD.
    """
    end = gl.minimum(gl.min(gl.where(ends > start, ends, FAR), axis=0), last)
    request = gl.sum((ends <= start).to(gl.int32), axis=0)
    prompt = gl.max(gl.where(requests == request, prompts, -1), axis=0)
    return request, end, prompt


@gluon.jit
def copy_state(state, p_block, live, K: gl.constexpr, V: gl.constexpr, NW: gl.constexpr):
    """Start the copy of 128 rows of both halves of a head's state; zeros when it is not live."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [NW, 1], [1, 0])
    KB: gl.constexpr = K // 128
    v_rows = state_rows(LAYOUT)
    cols = gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT))
    for half in gl.static_range(2):
        for b in gl.static_range(KB):
            async_copy.async_copy_global_to_shared(
                state.index(half * KB + b),
                p_block + (half * V * K + b * 128) + (v_rows * K)[:, None] + cols[None, :],
                mask=(v_rows >= 0)[:, None] & live,
            )
    async_copy.commit_group()


@gluon.jit
def load_decays(p_records_g, index, i_hv, HV: gl.constexpr, T: gl.constexpr):
    """The log decay of every ancestor, oldest first; zeros where there is none."""
    decays = ()
    for j in gl.static_range(T):
        at = index[1 + j]
        p_decay = p_records_g + at.to(gl.int64) * HV + i_hv
        decays = decays + (gl.load(p_decay, mask=at >= 0, other=0.0),)
    return decays


@gluon.jit
def suffix_decays(b_g, decays, T: gl.constexpr):
    """What is left of each ancestor's delta, newest first, and of the prompt's state.

    As suffix sums of g, so that nothing is ever divided by a decay.
    """
    decay = b_g
    fades = ()
    for i in gl.static_range(T):
        fades = fades + (gl.exp(decay),)
        decay = decay + decays[T - 1 - i]
    return fades, gl.exp(decay)


@gluon.jit
def take_apart(acc, BW: gl.constexpr, NW: gl.constexpr):
    """The product's rows of q and of k, in piece_layout."""
    uq, uk = acc.reshape([NW, 2, 8, 128]).permute(0, 2, 3, 1).split()
    return to_pieces(uq.reshape([BW, 128]), BW, NW), to_pieces(uk.reshape([BW, 128]), BW, NW)


@gluon.jit
def sigmoid(x):
    """By hand: a full division and an exponential with subnormals would take three times the instructions."""
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 e;
        mul.ftz.f32 e, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 e, e;
        add.ftz.f32 e, e, 0f3F800000;
        rcp.approx.ftz.f32 $0, e;
        }""",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def multiply(x, y):
    """The product of bf16, rounded once; two at a time."""
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def silu(x):
    x = widen(x)
    return x * sigmoid(x)


@gluon.jit
def gated_norm(o, gate, weight, eps, COLUMNS: gl.constexpr):
    """Norm every row, round to bf16, times the weight, times the gate, which is fp32 and has gone through SiLU."""
    o = (o * gl.rsqrt(gl.sum(o * o, axis=1) / COLUMNS + eps)[:, None]).to(gl.bfloat16)
    if weight.dtype == gl.bfloat16:
        o = widen(multiply(o, weight[None, :]))
    else:
        o = o.to(gl.float32) * weight.to(gl.float32)[None, :]
    return o * gate
