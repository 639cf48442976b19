# mypy: disable-error-code="no-untyped-def"
"""The row-wise ops in Triton: one read and one write of every row, whatever its strides."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onela.ops._checks import check_float, check_index
from onela.ops._overlap import overlap_of, wait_for_previous

ELEMENTS = 4096
"""Numbers in the tile of a program."""
MIN_PROGRAMS = 1024
"""About eight for every multiprocessor of a large GPU: loads of many programs hide each other's latency."""


@triton.jit
def row_offsets(o_r, H, s_t, s_h):
    """Where rows of a [T, H, D] tensor begin."""
    return (o_r // H).to(tl.int64) * s_t + (o_r % H).to(tl.int64) * s_h


@triton.jit
def rms_norm_kernel(
    p_x, p_residual, p_weight, p_o, num_rows, H, s_x_t, s_x_h, s_r_t, s_r_h, eps,
    D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, CENTERED: tl.constexpr, RESIDUAL: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_d = tl.arange(0, BLOCK_D)
    mask = (o_r < num_rows)[:, None] & (o_d < D)[None, :]
    # Before the store below, which no later load may pass.
    b_w = tl.load(p_weight + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    b_x = tl.load(p_x + row_offsets(o_r, H, s_x_t, s_x_h)[:, None] + o_d[None, :], mask=mask, other=0.0)
    b_x = b_x.to(tl.float32)
    if RESIDUAL:
        p_sum = p_residual + row_offsets(o_r, H, s_r_t, s_r_h)[:, None] + o_d[None, :]
        b_sum = (b_x + tl.load(p_sum, mask=mask, other=0.0).to(tl.float32)).to(p_residual.dtype.element_ty)
        tl.store(p_sum, b_sum, mask=mask)
        b_x = b_sum.to(tl.float32)
    b_n = b_x * tl.rsqrt(tl.sum(b_x * b_x, 1) / D + eps)[:, None]
    if CENTERED:
        b_o = b_n * (1.0 + b_w)[None, :]
    else:
        b_o = b_n.to(p_o.dtype.element_ty).to(tl.float32) * b_w[None, :]
    p_out = p_o + o_r.to(tl.int64)[:, None] * D + o_d[None, :]
    tl.store(p_out, b_o.to(p_o.dtype.element_ty), mask=mask)


@triton.jit
def gated_rms_norm_kernel(
    p_x, p_gate, p_weight, p_o, num_rows, H, s_x_t, s_x_h, s_g_t, s_g_h, eps,
    D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_d = tl.arange(0, BLOCK_D)
    mask = (o_r < num_rows)[:, None] & (o_d < D)[None, :]
    b_x = tl.load(p_x + row_offsets(o_r, H, s_x_t, s_x_h)[:, None] + o_d[None, :], mask=mask, other=0.0)
    b_g = tl.load(p_gate + row_offsets(o_r, H, s_g_t, s_g_h)[:, None] + o_d[None, :], mask=mask, other=0.0)
    b_x = b_x.to(tl.float32)
    b_g = b_g.to(tl.float32)
    b_w = tl.load(p_weight + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    b_n = (b_x * tl.rsqrt(tl.sum(b_x * b_x, 1) / D + eps)[:, None]).to(p_o.dtype.element_ty).to(tl.float32)
    b_n = (b_n * b_w[None, :]).to(p_o.dtype.element_ty).to(tl.float32)
    b_o = b_n * (b_g / (1.0 + tl.exp(-b_g)))
    p_out = p_o + o_r.to(tl.int64)[:, None] * D + o_d[None, :]
    tl.store(p_out, b_o.to(p_o.dtype.element_ty), mask=mask)


@triton.jit
def rotary_angles_kernel(
    p_positions, p_frequencies, p_cos, p_sin, size, HALF: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    b_angle = tl.load(p_positions + at // HALF, mask=mask, other=0).to(tl.float32)
    b_angle *= tl.load(p_frequencies + at % HALF, mask=mask, other=0.0)
    tl.store(p_cos + at, tl.cos(b_angle), mask=mask)
    tl.store(p_sin + at, tl.sin(b_angle), mask=mask)


@triton.jit
def rotary_kernel(
    p_x, p_cos, p_sin, p_o, num_rows, H, s_x_t, s_x_h,
    D: tl.constexpr, HALF: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_d = tl.arange(0, BLOCK_D)
    in_r = (o_r < num_rows)[:, None]
    mask = in_r & (o_d < D)[None, :]
    turned = in_r & (o_d < 2 * HALF)[None, :]
    p_row = p_x + row_offsets(o_r, H, s_x_t, s_x_h)[:, None]
    b_x = tl.load(p_row + o_d[None, :], mask=mask, other=0.0)
    # The other half of every pair; the second half of the pair's two lines has a plus.
    partner = tl.where(o_d < HALF, o_d + HALF, o_d - HALF)
    b_y = tl.load(p_row + partner[None, :], mask=turned, other=0.0).to(tl.float32)
    angle = (o_r // H).to(tl.int64)[:, None] * HALF + (o_d % HALF)[None, :]
    b_cos = tl.load(p_cos + angle, mask=turned, other=1.0).to(p_x.dtype.element_ty).to(tl.float32)
    b_sin = tl.load(p_sin + angle, mask=turned, other=0.0).to(p_x.dtype.element_ty).to(tl.float32)
    b_o = b_x.to(tl.float32) * b_cos + tl.where(o_d < HALF, -1.0, 1.0)[None, :] * b_y * b_sin
    p_out = p_o + o_r.to(tl.int64)[:, None] * D + o_d[None, :]
    tl.store(p_out, b_o.to(p_o.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_kernel(p_x, p_o, D, s_x, BLOCK: tl.constexpr):
    i_n = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = o_d < D
    b_gate = tl.load(p_x + i_n * s_x + o_d, mask=mask, other=0.0).to(tl.float32)
    b_up = tl.load(p_x + i_n * s_x + D + o_d, mask=mask, other=0.0).to(tl.float32)
    b_gate = (b_gate / (1.0 + tl.exp(-b_gate))).to(p_o.dtype.element_ty).to(tl.float32)
    tl.store(p_o + i_n * D + o_d, (b_gate * b_up).to(p_o.dtype.element_ty), mask=mask)


@triton.jit
def sigmoid_gate_kernel(
    p_x, p_gate, p_o, num_rows, H, s_x_t, s_x_h, s_g_t, s_g_h,
    D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_d = tl.arange(0, BLOCK_D)
    mask = (o_r < num_rows)[:, None] & (o_d < D)[None, :]
    b_x = tl.load(p_x + row_offsets(o_r, H, s_x_t, s_x_h)[:, None] + o_d[None, :], mask=mask, other=0.0)
    b_g = tl.load(p_gate + row_offsets(o_r, H, s_g_t, s_g_h)[:, None] + o_d[None, :], mask=mask, other=0.0)
    b_g = (1.0 / (1.0 + tl.exp(-b_g.to(tl.float32)))).to(p_o.dtype.element_ty).to(tl.float32)
    p_out = p_o + o_r.to(tl.int64)[:, None] * D + o_d[None, :]
    tl.store(p_out, (b_x.to(tl.float32) * b_g).to(p_o.dtype.element_ty), mask=mask)


def rms_norm_triton(
    x: Tensor, weight: Tensor, *, eps: float, zero_centered: bool = True, residual: Tensor | None = None
) -> Tensor:
    """`rms_norm_ref` in one launch, the sum with the residual included.

    Args:
        as in `rms_norm_ref`; x has two or three axes.
    Returns:
        [..., D] in x's dtype, contiguous.

    Writes: residual, when given.
    Layout: the last axis of x and residual is contiguous, the others may be strided.
    Numerics: as in `rms_norm_ref`; deterministic.
    Raises: ShapeError.
    """
    D = x.shape[-1]
    check_float("weight", weight, D)
    o = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, heads, s_t, s_h = _rows(x)
    if rows == 0:
        return o
    added = x if residual is None else residual
    check_float("residual", added, *x.shape)
    _, _, s_r_t, s_r_h = _rows(added)
    block_r, block_d = _tile(rows, D)
    rms_norm_kernel[(triton.cdiv(rows, block_r),)](
        x, added, weight, o, rows, heads, s_t, s_h, s_r_t, s_r_h, eps,
        D=D, BLOCK_R=block_r, BLOCK_D=block_d, CENTERED=zero_centered, RESIDUAL=residual is not None,
        num_warps=_warps(block_r * block_d), **overlap_of(x.device),
    )  # fmt: skip
    return o


def gated_rms_norm_triton(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """`gated_rms_norm_ref` in one launch.

    Args:
        as in `gated_rms_norm_ref`; x and gate have two or three axes.
    Returns:
        [..., V] in the gate's dtype, contiguous.

    Layout: the last axis of x and gate is contiguous, the others may be strided.
    Numerics: as in `gated_rms_norm_ref`; deterministic.
    Raises: ShapeError.
    """
    V = x.shape[-1]
    check_float("gate", gate, *x.shape)
    check_float("weight", weight, V)
    o = torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    rows, heads, s_t, s_h = _rows(x)
    if rows == 0:
        return o
    _, _, s_g_t, s_g_h = _rows(gate)
    block_r, block_d = _tile(rows, V)
    gated_rms_norm_kernel[(triton.cdiv(rows, block_r),)](
        x, gate, weight, o, rows, heads, s_t, s_h, s_g_t, s_g_h, eps,
        D=V, BLOCK_R=block_r, BLOCK_D=block_d, num_warps=_warps(block_r * block_d),
    )  # fmt: skip
    return o


def rotary_angles_triton(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """`rotary_angles_ref` in one launch.

    Args, Returns: as in `rotary_angles_ref`; positions and frequencies are contiguous.
    Raises: ShapeError, DtypeError.
    """
    check_index("positions", positions, None)
    check_float("frequencies", frequencies, None)
    half = frequencies.shape[0]
    cos, sin = (frequencies.new_empty(positions.shape[0], half) for _ in range(2))
    if cos.numel():
        block = 256
        rotary_angles_kernel[(triton.cdiv(cos.numel(), block),)](
            positions, frequencies, cos, sin, cos.numel(), HALF=half, BLOCK=block, num_warps=4
        )
    return cos, sin


def rotary_triton(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotary_ref` in one launch.

    Args:
        as in `rotary_ref`.
    Returns:
        [T, H, D] in x's dtype, contiguous.

    Layout: heads and rows of x may be strided; cos and sin are contiguous.
    Numerics: cos and sin are rounded to x's dtype first; the products are fp32 and rounded once.
    Raises: ShapeError.
    """
    T, _, D = x.shape
    half = cos.shape[-1]
    check_float("cos", cos, T, half)
    check_float("sin", sin, T, half)
    o = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, heads, s_t, s_h = _rows(x)
    if rows == 0:
        return o
    block_r, block_d = _tile(rows, D)
    rotary_kernel[(triton.cdiv(rows, block_r),)](
        x, cos.contiguous(), sin.contiguous(), o, rows, heads, s_t, s_h,
        D=D, HALF=half, BLOCK_R=block_r, BLOCK_D=block_d, num_warps=_warps(block_r * block_d),
    )  # fmt: skip
    return o


def swiglu_triton(gate_up: Tensor) -> Tensor:
    """`swiglu_ref` in one launch. Args: gate_up: [N, 2*D], rows may be strided. Returns: [N, D] contiguous."""
    N, twice = gate_up.shape
    D = twice // 2
    o = torch.empty(N, D, dtype=gate_up.dtype, device=gate_up.device)
    if o.numel() == 0:
        return o
    block = min(ELEMENTS, triton.next_power_of_2(D))
    swiglu_kernel[(N, triton.cdiv(D, block))](
        gate_up, o, D, gate_up.stride(0), BLOCK=block, num_warps=_warps(block)
    )
    return o


def sigmoid_gate_triton(x: Tensor, gate: Tensor) -> Tensor:
    """`sigmoid_gate_ref` in one launch. Args: x, gate: [T, H, D], may be strided. Returns: [T, H, D] contiguous."""
    check_float("gate", gate, *x.shape)
    o = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, heads, s_t, s_h = _rows(x)
    if rows == 0:
        return o
    _, _, s_g_t, s_g_h = _rows(gate)
    D = x.shape[-1]
    block_r, block_d = _tile(rows, D)
    sigmoid_gate_kernel[(triton.cdiv(rows, block_r),)](
        x, gate, o, rows, heads, s_t, s_h, s_g_t, s_g_h,
        D=D, BLOCK_R=block_r, BLOCK_D=block_d, num_warps=_warps(block_r * block_d),
        **overlap_of(x.device),
    )  # fmt: skip
    return o


def _rows(x: Tensor) -> tuple[int, int, int, int]:
    """Rows of x, rows that share the first axis, and the strides of both axes."""
    if x.dim() == 2:
        return x.shape[0], 1, x.stride(0), 0
    return x.shape[0] * x.shape[1], x.shape[1], x.stride(0), x.stride(1)


def _tile(rows: int, size: int) -> tuple[int, int]:
    """Rows and numbers of a program's tile: few rows are spread over as many programs as there are of them."""
    block_d = triton.next_power_of_2(size)
    block_r = max(1, min(ELEMENTS // block_d, triton.next_power_of_2(rows)))
    while block_r > 1 and triton.cdiv(rows, block_r) < MIN_PROGRAMS:
        block_r //= 2
    return block_r, block_d


def _warps(elements: int) -> int:
    return max(1, min(8, elements // 256), min(16, elements // 512))
