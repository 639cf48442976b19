# mypy: disable-error-code="no-untyped-def"
"""What stands around the chunked recurrence of packed prompts: convolution, SiLU, norms and gates in one launch, states
in and out in one each."""

import triton
import triton.language as tl

from onela.ops.gated_delta._replay_kernel import sigmoid


@triton.jit
def load_chunk(p_chunks, p_cu_seqlens, i_chunk):
    """Sequence, number, first row and sequence length of a chunk."""
    i_n = tl.load(p_chunks + i_chunk * 2).to(tl.int64)
    i_t = tl.load(p_chunks + i_chunk * 2 + 1).to(tl.int64)
    bos = tl.load(p_cu_seqlens + i_n).to(tl.int64)
    eos = tl.load(p_cu_seqlens + i_n + 1).to(tl.int64)
    return i_n, i_t, bos, eos - bos


@triton.jit
def _convolve(
    p_x, p_weight, p_conv_state, o_r, first, T, o_c, m_c, i_place, s_x,
    C: tl.constexpr, KERNEL: tl.constexpr, CACHED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """`silu(conv(x))` of rows `o_r` of a tile, [ROWS, BLOCK] fp32.

    `p_x` is the tile's first row, token `first` of its sequence; `i_place` is PAD unless the sequence's past is kept.
    """
    b_y = tl.zeros([o_r.shape[0], o_c.shape[0]], tl.float32)
    for i in tl.static_range(KERNEL):
        o_s = o_r - (KERNEL - 1 - i)
        m_x = ((first + o_s >= 0) & (first + o_s < T))[:, None] & m_c[None, :]
        b_x = tl.load(p_x + (o_s * s_x)[:, None] + o_c[None, :], mask=m_x, other=0.0)
        b_w = tl.load(p_weight + o_c * KERNEL + i, mask=m_c, other=0.0).to(tl.float32)
        b_y += b_x.to(tl.float32) * b_w[None, :]
    if CACHED:  # noqa: SIM102 - one is known when the kernel is compiled, the other is not
        if (first == 0) & (i_place >= 0):
            # Inputs before the sequence are the tail of what the prompt holds: column by column into the first rows.
            for i in tl.static_range(KERNEL - 1):
                b_w = tl.load(p_weight + o_c * KERNEL + i, mask=m_c, other=0.0).to(tl.float32)
                for j in tl.static_range(KERNEL - 1 - i):
                    p_tail = p_conv_state + (i_place * C + o_c) * (KERNEL - 1) + i + j
                    b_tail = b_w * tl.load(p_tail, mask=m_c, other=0.0).to(tl.float32)
                    b_y += tl.where((o_r == j)[:, None], b_tail[None, :], 0.0)
    return b_y * sigmoid(b_y, UPCAST)


@triton.jit
def _write_head(p_o, b_y, o_r, o_d, mask, HEADS: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr):
    """One head of a tile, normed when it is a query's or a key's; `p_o` is where its first row begins."""
    b_y = b_y.to(p_o.dtype.element_ty)
    if NORM:
        b_wide = b_y.to(tl.float32)
        b_y = (b_wide * tl.rsqrt(tl.sum(b_wide * b_wide, 1) + 1e-6)[:, None]).to(p_o.dtype.element_ty)
    tl.store(p_o + (o_r * (HEADS * D))[:, None] + o_d[None, :], b_y, mask=mask)


@triton.jit
def conv_gates_prefill_kernel(
    p_x, p_a, p_b, p_weight, p_A_log, p_dt_bias, p_conv_state, p_cu_seqlens, p_prompts, p_cached_lens, p_chunks,
    p_q, p_k, p_v, p_g, p_beta, s_x, s_a, s_b,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KERNEL: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_HV: tl.constexpr,
    CACHED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A program owns one head of `ROWS` tokens; the last of a chunk's first ones owns the gates of the whole chunk.

    g is written as its running sum over the chunk, in base two.
    """
    i_c = tl.program_id(0)
    TILES: tl.constexpr = CHUNK // ROWS
    i_chunk = (tl.program_id(1) // TILES).to(tl.int64)
    i_tile = tl.program_id(1) % TILES
    i_n, i_t, bos, T = load_chunk(p_chunks, p_cu_seqlens, i_chunk)
    first = i_t * CHUNK + i_tile * ROWS
    if first >= T:
        return
    C: tl.constexpr = 2 * H * K + HV * V
    if i_c == 2 * H + HV:
        if i_tile > 0:
            return
        o_t = i_t * CHUNK + tl.arange(0, CHUNK)
        o_h = tl.arange(0, BLOCK_HV)
        m_h = o_h < HV
        m_gate = (o_t < T)[:, None] & m_h[None, :]
        b_a = tl.load(p_a + ((bos + o_t) * s_a)[:, None] + o_h[None, :], mask=m_gate, other=0.0).to(
            tl.float32
        )
        b_b = tl.load(p_b + ((bos + o_t) * s_b)[:, None] + o_h[None, :], mask=m_gate, other=0.0).to(
            tl.float32
        )
        b_a += tl.load(p_dt_bias + o_h, mask=m_h, other=0.0).to(tl.float32)[None, :]
        b_rate = tl.exp(tl.load(p_A_log + o_h, mask=m_h, other=0.0).to(tl.float32))
        b_g = -b_rate[None, :] * (tl.maximum(b_a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(b_a))))
        b_g = tl.cumsum(tl.where(m_gate, b_g, 0.0), 0) * 1.4426950408889634
        p_gate = ((bos + o_t) * HV)[:, None] + o_h[None, :]
        tl.store(p_g + p_gate, b_g, mask=m_gate)
        tl.store(p_beta + p_gate, 1.0 / (1.0 + tl.exp(-b_b)), mask=m_gate)
        return
    i_place = tl.load(p_prompts + i_n).to(tl.int64)
    if CACHED:
        i_place = tl.where(tl.load(p_cached_lens + i_n) > 0, i_place, -1)
    row = bos + first
    p_x += row * s_x
    o_r = tl.arange(0, ROWS)
    m_r = first + o_r < T
    # Names of their own in each branch: heads of q and k may be wider or narrower than those of v.
    if i_c < 2 * H:
        o_k = tl.arange(0, BLOCK_K)
        m_k = m_r[:, None] & (o_k < K)[None, :]
        b_k = _convolve(
            p_x, p_weight, p_conv_state, o_r, first, T, i_c * K + o_k, o_k < K, i_place, s_x, C, KERNEL, CACHED, UPCAST
        )  # fmt: skip
        if i_c < H:
            _write_head(p_q + (row * H + i_c) * K, b_k, o_r, o_k, m_k, H, K, True)
        else:
            _write_head(p_k + (row * H + i_c - H) * K, b_k, o_r, o_k, m_k, H, K, True)
    else:
        o_v = tl.arange(0, BLOCK_V)
        m_v = m_r[:, None] & (o_v < V)[None, :]
        o_c = 2 * H * K + (i_c - 2 * H) * V + o_v
        b_v = _convolve(
            p_x, p_weight, p_conv_state, o_r, first, T, o_c, o_v < V, i_place, s_x, C, KERNEL, CACHED, UPCAST
        )  # fmt: skip
        _write_head(p_v + (row * HV + i_c - 2 * H) * V, b_v, o_r, o_v, m_v, HV, V, False)


@triton.jit
def load_states_kernel(
    p_states, p_prompts, p_cached_lens, p_o, ROW: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """The fp32 states of the sequences, zeros where nothing is cached; a row is all heads, `SIZE` numbers each."""
    i_n = tl.program_id(1).to(tl.int64)
    o_x = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_x = o_x < ROW
    i_place = tl.load(p_prompts + i_n).to(tl.int64)
    m_kept = m_x & (i_place >= 0) & (tl.load(p_cached_lens + i_n) > 0)
    if SPLIT:
        p_high = p_states + i_place * (2 * ROW) + (o_x // SIZE) * (2 * SIZE) + o_x % SIZE
        b_x = tl.load(p_high, mask=m_kept, other=0.0).to(tl.float32)
        b_x += tl.load(p_high + SIZE, mask=m_kept, other=0.0).to(tl.float32)
    else:
        b_x = tl.load(p_states + i_place * ROW + o_x, mask=m_kept, other=0.0).to(tl.float32)
    tl.store(p_o + i_n * ROW + o_x, b_x, mask=m_x)


@triton.jit
def write_tail(
    p_x, p_conv_state, i_place, bos, eos, has_past, o_c, m_c, s_x,
    C: tl.constexpr, KERNEL: tl.constexpr, CACHED: tl.constexpr,
):  # fmt: skip
    """Keep the last inputs of channels `o_c` of a sequence at a prompt's place."""
    p_tail = p_conv_state + (i_place * C + o_c) * (KERNEL - 1)
    for i in tl.static_range(KERNEL - 1):
        o_s = eos - (KERNEL - 1) + i
        b_x = tl.load(p_x + o_s * s_x + o_c, mask=m_c & (o_s >= bos), other=0.0)
        if CACHED:
            # A piece shorter than the window keeps some of the old tail: it stands further back than where it goes.
            m_past = m_c & (o_s < bos) & has_past
            b_past = tl.load(p_tail + (KERNEL - 1) + o_s - bos, mask=m_past, other=0.0)
            b_x = tl.where(o_s < bos, b_past.to(b_x.dtype), b_x)
        tl.store(p_tail + i, b_x.to(p_conv_state.dtype.element_ty), mask=m_c)


@triton.jit(do_not_specialize=["num_state_blocks"])
def store_states_kernel(
    p_final, p_states, p_x, p_conv_state, p_cu_seqlens, p_prompts, p_cached_lens, s_x, num_state_blocks,
    ROW: tl.constexpr, SIZE: tl.constexpr, C: tl.constexpr, KERNEL: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr, SPLIT: tl.constexpr, CACHED: tl.constexpr,
):  # fmt: skip
    """The states that the sequences have reached, and the last inputs of their convolutions, to the prompts' places."""
    i_x = tl.program_id(0).to(tl.int64)
    i_n = tl.program_id(1).to(tl.int64)
    i_place = tl.load(p_prompts + i_n).to(tl.int64)
    bos = tl.load(p_cu_seqlens + i_n).to(tl.int64)
    eos = tl.load(p_cu_seqlens + i_n + 1).to(tl.int64)
    if i_place < 0:
        return
    if eos <= bos:
        return
    if i_x < num_state_blocks:
        o_x = i_x * BLOCK + tl.arange(0, BLOCK)
        m_x = o_x < ROW
        b_x = tl.load(p_final + i_n * ROW + o_x, mask=m_x, other=0.0)
        if SPLIT:
            p_high = p_states + i_place * (2 * ROW) + (o_x // SIZE) * (2 * SIZE) + o_x % SIZE
            b_high = b_x.to(p_states.dtype.element_ty)
            tl.store(p_high, b_high, mask=m_x)
            tl.store(p_high + SIZE, (b_x - b_high.to(tl.float32)).to(p_states.dtype.element_ty), mask=m_x)
        else:
            tl.store(p_states + i_place * ROW + o_x, b_x.to(p_states.dtype.element_ty), mask=m_x)
        return
    o_c = (i_x - num_state_blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    has_past = i_place >= 0
    if CACHED:
        has_past = tl.load(p_cached_lens + i_n) > 0
    write_tail(p_x, p_conv_state, i_place, bos, eos, has_past, o_c, o_c < C, s_x, C, KERNEL, CACHED)
