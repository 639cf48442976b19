"""Prefill of packed prompts on a GPU: one launch for convolution, SiLU, norms and gates, then the chunked recurrence.

Nothing is read on the host: what a launch must know of the prompts is in tables on the device, and their number and
length only bound its grid. So the whole can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from onela.errors import DtypeError
from onela.ops._checks import check_float, check_groups, check_index
from onela.ops.gated_delta._checks import check_layout, check_state
from onela.ops.gated_delta._launch import INTERPRETED
from onela.ops.gated_delta._prefill_kernel import conv_gates_prefill_kernel
from onela.ops.gated_delta.chunk_fla import chunk_rule_fla, chunked_kernels
from onela.ops.gated_delta.chunk_rule import chunk_rule_triton, takes
from onela.ops.gated_delta.layer_prefill_reference import layer_sizes
from onela.ops.prefill_tables import CHUNK, PrefillTables

CONV_ROWS = 16
"""Tokens of a program of the convolution: few, so that many programs wait for memory at a time."""
HALVES = (torch.bfloat16, torch.float16)


def supports(mixed_qkv: Tensor, recurrent_state: Tensor) -> bool:
    """Whether these can run here: on a GPU, 16-bit rows, heads that our kernels or those of fla-core take."""
    if not (mixed_qkv.is_cuda and mixed_qkv.dtype in HALVES):
        return False
    V, K = recurrent_state.shape[-2:]
    if takes(K, V, mixed_qkv.device):
        return True
    return K % 16 == 0 and V % 16 == 0 and K <= 256 and chunked_kernels() is not None


def conv_gates_prefill(
    mixed_qkv: Tensor,
    b: Tensor,
    a: Tensor,
    *,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    conv_state: Tensor,
    sizes: tuple[int, int, int, int],
    tables: PrefillTables,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Convolution, SiLU, norms of q and k, and gates, in one launch: q, k, v, g and beta of `chunk_rule_triton`."""
    H, HV, K, V = sizes
    T = mixed_qkv.shape[0]
    q, k, v = (mixed_qkv.new_empty(T, heads, size) for heads, size in ((H, K), (H, K), (HV, V)))
    g = torch.empty(T, HV, dtype=torch.float32, device=mixed_qkv.device)
    beta = torch.empty_like(g)
    conv_gates_prefill_kernel[(2 * H + HV + 1, tables.chunks.shape[0] * (CHUNK // CONV_ROWS))](
        *(mixed_qkv, a, b, conv_weight, A_log, dt_bias, conv_state),
        *(tables.cu_seqlens, tables.prompts, tables.cached_lens, tables.chunks),
        *(q, k, v, g, beta, mixed_qkv.stride(0), a.stride(0), b.stride(0)),
        H=H,
        HV=HV,
        K=K,
        V=V,
        KERNEL=conv_weight.shape[1],
        CHUNK=CHUNK,
        ROWS=CONV_ROWS,
        BLOCK_K=triton.next_power_of_2(K),
        BLOCK_V=triton.next_power_of_2(V),
        BLOCK_HV=max(16, triton.next_power_of_2(HV)),
        CACHED=tables.goes_on,
        UPCAST=INTERPRETED,
        num_warps=4,
    )
    return q, k, v, g, beta


def gated_delta_layer_prefill_chunked(
    mixed_qkv: Tensor,
    b: Tensor,
    a: Tensor,
    *,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    recurrent_state: Tensor,
    conv_state: Tensor,
    tables: PrefillTables,
) -> Tensor:
    """`gated_delta_layer_prefill_ref`'s contract on a GPU, for 16-bit rows.

    Args:
        as in `gated_delta_layer_prefill_ref`; the prompts are those of `tables`.
    Returns:
        o: [T, HV, V] in mixed_qkv's dtype.

    Writes: recurrent_state and conv_state at the prompts that have new tokens.
    Layout: rows of mixed_qkv, b and a may be strided; all else is contiguous.
    Padding: the last sequence of the tables is computed and goes nowhere.
    Numerics: fp32 sums of 16-bit operands; q, k and v after the convolution and the norms are rounded to 16 bits. As in
        `chunk_rule_triton` where that takes the heads, else as in `chunk_rule_fla`.
    Raises: ShapeError, DtypeError.
    """
    T, C = mixed_qkv.shape
    sizes = layer_sizes(mixed_qkv, a, recurrent_state)
    H, HV, K, V = sizes
    check_groups(HV, H)
    check_float("b", b, T, HV)
    check_float("conv_weight", conv_weight, C, None)
    check_float("conv_state", conv_state, None, C, conv_weight.shape[1] - 1)
    check_float("A_log", A_log, HV)
    check_float("dt_bias", dt_bias, HV)
    check_state(recurrent_state, HV=HV, K=K, V=V)
    check_index("page_rows", tables.page_rows, T)
    for name, tensor in {"mixed_qkv": mixed_qkv, "a": a, "b": b}.items():
        check_layout(name, tensor)
    for name, tensor in {"conv_weight": conv_weight, "conv_state": conv_state}.items():
        check_layout(name, tensor, contiguous=True)
    if mixed_qkv.dtype not in HALVES:
        raise DtypeError(f"mixed_qkv: expected bfloat16 or float16, got {mixed_qkv.dtype}")
    q, k, v, g, beta = conv_gates_prefill(
        mixed_qkv,
        b,
        a,
        conv_weight=conv_weight,
        A_log=A_log,
        dt_bias=dt_bias,
        conv_state=conv_state,
        sizes=sizes,
        tables=tables,
    )
    rule = chunk_rule_triton if takes(K, V, q.device) else chunk_rule_fla
    return rule(q, k, v, g, beta, mixed_qkv, recurrent_state, conv_state, tables)
