"""Projection replay as one portable Triton kernel (sm_80 and newer, and Triton's interpreter).

A program owns one value head (or a block of its value columns) of one request, keeps the prompt's state in shared memory and
walks over tiles of the request's beams. Records are folded in from the newest to the oldest, so that the decay between
a record and the present is a running product and nothing is ever divided by a decay.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from onela.errors import DtypeError, ShapeError
from onela.ops._checks import check_float, check_groups, check_index, check_shape

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run on the CPU; `tl.dot` of bf16 operands is wrong there, so kernels upcast first."""

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class ReplayConfig:
    """How the kernel is cut: tile sizes, warps, pipeline stages, and programs wanted on each multiprocessor."""

    block_w: int = 32
    block_v: int = 128
    num_warps: int = 4
    stages: int = 2
    unroll: bool = False
    programs_per_sm: int = 2


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
        b_low = tl.load(p_head + V * K + o_state)
    else:
        b_state = tl.load(p_state + (i_row * HV + i_hv) * (V * K) + o_state)
        b_high = b_state.to(tl.bfloat16)
        b_low = (b_state - b_high.to(tl.float32)).to(tl.bfloat16)
    return b_high, b_low


@triton.jit
def project(b_x, b_high, b_low, UPCAST: tl.constexpr):
    """`x [BLOCK_W, K] @ state [K, BLOCK_V]` to fp32 worth: bf16 rows against both halves, wider rows against their sum."""
    if UPCAST or b_x.dtype != tl.bfloat16:
        b_state = b_high.to(tl.float32) + b_low.to(tl.float32)
        return tl.dot(b_x.to(tl.float32), b_state, input_precision="ieee" if UPCAST else "tf32x3")
    else:
        return tl.dot(b_x, b_low, tl.dot(b_x, b_high))


@triton.jit
def fold_record(
    i_slot,
    b_q,
    b_k,
    b_from_q,
    b_from_k,
    b_decay,
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
    """Add one ancestor's part to both projections; `b_decay` is the decay from that ancestor to the parent."""
    m_slot = i_slot >= 0
    i_slot = i_slot.to(tl.int64)
    b_key = tl.load(
        p_records_k + ((i_slot * H + i_h) * K)[:, None] + o_k[None, :], mask=m_slot[:, None], other=0.0
    )
    b_delta = tl.load(
        p_records_delta + ((i_slot * HV + i_hv) * V)[:, None] + o_v[None, :], mask=m_slot[:, None], other=0.0
    )
    b_g = tl.load(p_records_g + i_slot * HV + i_hv, mask=m_slot, other=0.0)
    b_key = b_key.to(tl.float32)
    b_delta = b_delta.to(tl.float32)
    b_from_q += b_delta * (tl.sum(b_key * b_q, 1) * b_decay)[:, None]
    b_from_k += b_delta * (tl.sum(b_key * b_k, 1) * b_decay)[:, None]
    return b_from_q, b_from_k, b_decay * tl.exp(b_g)


@triton.jit
def replay_rows(
    b_xq,
    b_xk,
    b_v,
    b_g,
    b_beta,
    b_high,
    b_low,
    i_rows,
    m_live,
    depth,
    p_ancestors,
    s_ancestors,
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
    STAGES: tl.constexpr,
    UNROLL: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Replay a tile of beams: returns the output and the delta record, [BLOCK_W, BLOCK_V] fp32."""
    b_q = b_xq.to(tl.float32)
    b_k = b_xk.to(tl.float32)
    b_from_q = tl.zeros([b_xq.shape[0], o_v.shape[0]], tl.float32)
    b_from_k = tl.zeros([b_xq.shape[0], o_v.shape[0]], tl.float32)
    b_decay = tl.full([b_xq.shape[0]], 1.0, tl.float32)
    if UNROLL:
        for i in tl.static_range(MAX_DEPTH):
            j = MAX_DEPTH - 1 - i
            i_slot = tl.load(p_ancestors + i_rows * s_ancestors + j, mask=m_live & (j < depth), other=-1)
            b_from_q, b_from_k, b_decay = fold_record(
                i_slot, b_q, b_k, b_from_q, b_from_k, b_decay, p_records_g, p_records_delta, p_records_k,
                i_h, i_hv, o_k, o_v, H, HV, K, V,
            )  # fmt: skip
    elif MAX_DEPTH > 0:
        for i in tl.range(0, depth, num_stages=STAGES):
            j = depth - 1 - i
            i_slot = tl.load(p_ancestors + i_rows * s_ancestors + j, mask=m_live, other=-1)
            b_from_q, b_from_k, b_decay = fold_record(
                i_slot, b_q, b_k, b_from_q, b_from_k, b_decay, p_records_g, p_records_delta, p_records_k,
                i_h, i_hv, o_k, o_v, H, HV, K, V,
            )  # fmt: skip
    b_q_scale = scale * tl.rsqrt(tl.sum(b_q * b_q, 1) + 1e-6)
    b_k_scale = tl.rsqrt(tl.sum(b_k * b_k, 1) + 1e-6)
    b_qk = tl.sum(b_q * b_k, 1) * b_q_scale * b_k_scale
    b_uq = project(b_xq, b_high, b_low, UPCAST) * b_decay[:, None] + b_from_q
    b_uk = project(b_xk, b_high, b_low, UPCAST) * b_decay[:, None] + b_from_k
    b_alpha = tl.exp(b_g)
    b_delta = b_beta[:, None] * (b_v - b_uk * (b_alpha * b_k_scale)[:, None])
    b_o = b_uq * (b_alpha * b_q_scale)[:, None] + b_delta * b_qk[:, None]
    return b_o, b_delta * b_k_scale[:, None]


@triton.jit
def load_request(p_cu_rows, p_prompts, p_depths, i_request, num_requests, num_rows):
    """Rows, prompt and depth of a request; the one past the last is what lies behind `cu_rows[-1]`, without a prompt."""
    m_request = i_request < num_requests
    begin = tl.load(p_cu_rows + i_request).to(tl.int32)
    end = tl.load(p_cu_rows + i_request + 1, mask=m_request, other=num_rows).to(tl.int32)
    i_prompt = tl.load(p_prompts + i_request, mask=m_request, other=-1).to(tl.int64)
    depth = tl.load(p_depths + i_request, mask=m_request, other=0).to(tl.int32)
    return begin, end, i_prompt, depth


@triton.jit
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
    BLOCK_W: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    UNROLL: tl.constexpr,
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
    for start in tl.range(begin, end, num_splits * BLOCK_W, num_stages=STAGES if UNROLL else 1):
        i_rows = (start + o_w).to(tl.int64)
        m_rows = i_rows < end
        i_slot = tl.load(p_slots + i_rows, mask=m_rows, other=-1).to(tl.int64)
        m_live = i_slot >= 0
        b_xq = tl.load(
            p_q + (i_rows * s_q_n + i_h * s_q_h)[:, None] + o_k[None, :], mask=m_rows[:, None], other=0.0
        )
        if KEY_IS_RECORD:
            p_key = p_records_k + ((i_slot * H + i_h) * K)[:, None] + o_k[None, :]
            b_xk = tl.load(p_key, mask=m_live[:, None], other=0.0)
        else:
            b_xk = tl.load(
                p_k + (i_rows * s_k_n + i_h * s_k_h)[:, None] + o_k[None, :], mask=m_rows[:, None], other=0.0
            )
        b_v = tl.load(
            p_v + (i_rows * s_v_n + i_hv * s_v_h)[:, None] + o_v[None, :], mask=m_rows[:, None], other=0.0
        )
        b_g = tl.load(p_g + i_rows * s_g + i_hv, mask=m_rows, other=0.0).to(tl.float32)
        b_beta = tl.load(p_beta + i_rows * s_beta + i_hv, mask=m_rows, other=0.0).to(tl.float32)
        b_o, b_delta = replay_rows(
            b_xq, b_xk, b_v.to(tl.float32), b_g, b_beta, b_high, b_low, i_rows, m_live, depth,
            p_ancestors, s_ancestors, p_records_g, p_records_delta, p_records_k, i_h, i_hv, o_k, o_v, scale,
            H, HV, K, V, MAX_DEPTH, STAGES, UNROLL, UPCAST,
        )  # fmt: skip
        b_o = tl.where(m_live[:, None], b_o, 0.0)
        p_out = p_o + ((i_rows * HV + i_hv) * V)[:, None] + o_v[None, :]
        tl.store(p_out, b_o.to(p_o.dtype.element_ty), mask=m_rows[:, None])
        p_new = p_records_delta + ((i_slot * HV + i_hv) * V)[:, None] + o_v[None, :]
        tl.store(p_new, b_delta.to(p_records_delta.dtype.element_ty), mask=m_live[:, None])
        if i_v == 0:
            tl.store(p_records_g + i_slot * HV + i_hv, b_g, mask=m_live)
            if not KEY_IS_RECORD:
                if i_hv % (HV // H) == 0:
                    p_new = p_records_k + ((i_slot * H + i_h) * K)[:, None] + o_k[None, :]
                    tl.store(p_new, b_xk.to(p_records_k.dtype.element_ty), mask=m_live[:, None])


def replay_step_triton(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    recurrent_state: Tensor,
    records_g: Tensor,
    records_delta: Tensor,
    records_k: Tensor,
    slots: Tensor,
    ancestors: Tensor,
    cu_rows: Tensor,
    prompts: Tensor,
    depths: Tensor,
    scale: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """One decode step of every beam by projection replay: the contract of `replay_step_ref`, in one launch.

    Args:
        As in `replay_step_ref`; floating-point inputs are bf16, fp16 or fp32, K and V powers of two from 16 to 512.
    Returns:
        o: [N, HV, V].

    Writes, Padding, Aliasing: as in `replay_step_ref`.
    Layout: the last axis of every tensor is contiguous; records and state are contiguous; rows and heads of q, k, v and rows
        of g, beta and ancestors may be strided.
    Numerics: fp32 accumulation; bf16 q and k meet the state as two bf16 halves (16 bits of mantissa), wider ones as tf32x3;
        deterministic; a row does not depend on the other rows.
    Raises: ShapeError, DtypeError.
    """
    return launch_replay(
        q, k, v, g, beta, recurrent_state=recurrent_state, records_g=records_g, records_delta=records_delta,
        records_k=records_k, slots=slots, ancestors=ancestors, cu_rows=cu_rows, prompts=prompts, depths=depths,
        scale=scale, out_dtype=out_dtype, config=None,
    )  # fmt: skip


def launch_replay(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    recurrent_state: Tensor,
    records_g: Tensor,
    records_delta: Tensor,
    records_k: Tensor,
    slots: Tensor,
    ancestors: Tensor,
    cu_rows: Tensor,
    prompts: Tensor,
    depths: Tensor,
    scale: float | None,
    out_dtype: torch.dtype | None,
    config: ReplayConfig | None,
) -> Tensor:
    """`replay_step_triton` with the cut of the work given; None picks it by shape."""
    N, H, K = q.shape
    HV, V = v.shape[1:]
    B = prompts.shape[0]
    check_replay(q, k, v, g, beta, records_g, records_delta, records_k)
    check_state(recurrent_state, HV, V, K)
    check_steps(N, B, slots, ancestors, cu_rows, depths)
    o = torch.empty(N, HV, V, device=v.device, dtype=v.dtype if out_dtype is None else out_dtype)
    if N == 0:
        return o
    depth = ancestors.shape[1]
    config = config or choose_replay(H, HV, K, V, depth, q.dtype.itemsize)
    block_v = min(config.block_v, V)
    num_splits = choose_splits(N, B, HV * (V // block_v), config.block_w, config.programs_per_sm, q.device)
    key = records_k if k is None else k
    grid = (num_splits, HV * (V // block_v), B + 1)
    gated_delta_replay_kernel[grid](
        q, key, v, g, beta, recurrent_state, records_g, records_delta, records_k,
        slots, ancestors, cu_rows, prompts, depths, o,
        N, B, num_splits, K**-0.5 if scale is None else scale,
        q.stride(0), q.stride(1), key.stride(0), key.stride(1), v.stride(0), v.stride(1),
        g.stride(0), beta.stride(0), ancestors.stride(0),
        H=H, HV=HV, K=K, V=V, MAX_DEPTH=depth, BLOCK_W=config.block_w, BLOCK_V=block_v,
        STAGES=config.stages, UNROLL=config.unroll, SPLIT_STATE=recurrent_state.dim() == 5, KEY_IS_RECORD=k is None,
        UPCAST=INTERPRETED, num_warps=config.num_warps,
    )  # fmt: skip
    return o


def choose_replay(H: int, HV: int, K: int, V: int, depth: int, itemsize: int) -> ReplayConfig:
    """The cut for a shape. Both halves of a state block take `4 * K * block_v` bytes of shared memory."""
    block_v = max(16, min(V, 16384 // K))
    return ReplayConfig(block_v=block_v, block_w=32 if K * itemsize <= 512 else 16)


def choose_splits(
    N: int, B: int, heads: int, block_w: int, programs_per_sm: int, device: torch.device
) -> int:
    """Programs per request and head: enough to fill the device, no more than the mean request has tiles."""
    wanted = programs_per_sm * _multiprocessors(device)
    tiles = max(1, triton.cdiv(N, max(B, 1) * block_w))
    return min(tiles, max(1, wanted // max(1, B * heads)))


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def check_size(name: str, size: int) -> None:
    """Raise `ShapeError` unless a head size is a power of two from 16 to 512."""
    if size < 16 or size > 512 or size & (size - 1):
        raise ShapeError(f"{name}: expected a power of two from 16 to 512, got {size}")


def check_layout(name: str, tensor: Tensor, *, contiguous: bool = False) -> None:
    """Raise unless a kernel can read the tensor: a supported dtype, and contiguous (or only its last axis)."""
    if tensor.is_floating_point() and tensor.dtype not in FLOATS:
        raise DtypeError(f"{name}: expected bfloat16, float16 or float32, got {tensor.dtype}")
    ok = tensor.is_contiguous() if contiguous else tensor.shape[-1] <= 1 or tensor.stride(-1) == 1
    if not ok:
        wanted = "a contiguous tensor" if contiguous else "a contiguous last axis"
        raise ShapeError(f"{name}: expected {wanted}, got strides {list(tensor.stride())}")


def check_state(recurrent_state: Tensor, HV: int, V: int, K: int) -> None:
    """Refuse a prompt state that is neither fp32 nor split bf16."""
    if recurrent_state.dim() == 5:
        check_shape("recurrent_state", recurrent_state, None, HV, 2, V, K)
        wanted = torch.bfloat16
    else:
        check_shape("recurrent_state", recurrent_state, None, HV, V, K)
        wanted = torch.float32
    if recurrent_state.dtype != wanted:
        raise DtypeError(
            f"recurrent_state: expected {wanted} for {recurrent_state.dim()} axes, got {recurrent_state.dtype}"
        )
    check_layout("recurrent_state", recurrent_state, contiguous=True)


def check_steps(N: int, B: int, slots: Tensor, ancestors: Tensor, cu_rows: Tensor, depths: Tensor) -> None:
    """Refuse a step's index tensors when their shapes or dtypes do not fit together."""
    check_index("slots", slots, N)
    check_index("ancestors", ancestors, N, None)
    check_index("cu_rows", cu_rows, B + 1)
    check_index("depths", depths, B)
    check_layout("slots", slots, contiguous=True)
    check_layout("ancestors", ancestors)


def check_replay(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    records_g: Tensor,
    records_delta: Tensor,
    records_k: Tensor,
) -> None:
    """Refuse rows and records whose shapes, dtypes or layouts the kernel cannot take."""
    N, H, K = q.shape
    HV, V = v.shape[1:]
    check_groups(HV, H)
    check_size("K", K)
    check_size("V", V)
    rows = {"q": (q, H, K), "v": (v, HV, V), "g": (g, HV), "beta": (beta, HV)}
    if k is not None:
        rows["k"] = (k, H, K)
    for name, (tensor, *sizes) in rows.items():
        check_float(name, tensor, N, *sizes)
        check_layout(name, tensor)
    records = {
        "records_g": (records_g, HV),
        "records_delta": (records_delta, HV, V),
        "records_k": (records_k, H, K),
    }
    for name, (tensor, *sizes) in records.items():
        check_float(name, tensor, None, *sizes)
        check_layout(name, tensor, contiguous=True)
