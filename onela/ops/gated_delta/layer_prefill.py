"""Prefill of packed prompts on a GPU: one launch before fla-core's chunked recurrence, one after it.

Nothing is read on the host: what a launch must know of the prompts is in tables on the device, and their number and
length only bound its grid. So the whole can be captured in a CUDA graph.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from onela.errors import DtypeError
from onela.ops._checks import check_float, check_groups, check_index
from onela.ops.gated_delta._checks import check_layout, check_state
from onela.ops.gated_delta._chunk_kernel import chunk_prepare_kernel, chunk_scan_kernel
from onela.ops.gated_delta._launch import INTERPRETED
from onela.ops.gated_delta._prefill_kernel import (
    conv_gates_prefill_kernel,
    load_states_kernel,
    store_states_kernel,
)
from onela.ops.gated_delta.layer_prefill_reference import layer_sizes
from onela.ops.prefill_tables import CHUNK, PrefillTables

HALVES = (torch.bfloat16, torch.float16)
TUNING_TOKENS = 2048
"""Tokens of each of the four sequences that fla-core's kernels are tuned on."""
OWN = False
_tuned: set[tuple[object, ...]] = set()


@lru_cache(maxsize=1)
def chunked_kernels() -> Any:
    """fla-core's steps of the chunked rule as one namespace; None where it is not installed."""
    try:
        from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h
        from fla.ops.common.chunk_o import chunk_fwd_o
        from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
    except ImportError:
        return None

    class Kernels:
        intra = staticmethod(chunk_gated_delta_rule_fwd_intra)
        states = staticmethod(chunk_gated_delta_rule_fwd_h)
        outputs = staticmethod(chunk_fwd_o)

    return Kernels


def supports(mixed_qkv: Tensor, recurrent_state: Tensor) -> bool:
    """Whether these can run here: on a GPU with fla-core, 16-bit rows, keys of at most 256."""
    V, K = recurrent_state.shape[-2:]
    fits = mixed_qkv.is_cuda and mixed_qkv.dtype in HALVES and K % 16 == 0 and V % 16 == 0 and K <= 256
    return fits and chunked_kernels() is not None


def chunked_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    tables: PrefillTables,
) -> tuple[Tensor, Tensor]:
    """The recurrence by fla-core's kernels, without its bookkeeping on the host.

    Args:
        q, k: [T, H, K], normed. v: [T, HV, V]. g: [T, HV] fp32, its running sum over each chunk, in base two.
        beta: [T, HV] fp32. initial_state: [S, HV, V, K] fp32; None for zeros.
    Returns:
        o: [T, HV, V]. final_state: [S, HV, V, K] fp32.
    """
    kernels = chunked_kernels()
    places = {"cu_seqlens": tables.cu_seqlens, "chunk_indices": tables.chunks}
    q, k, v, g, beta = (x[None] for x in (q, k, v, g, beta))
    w, u, _ = kernels.intra(k=k, v=v, g=g, beta=beta, chunk_size=CHUNK, **places)
    states, deltas, final = kernels.states(
        k=k,
        w=w,
        u=u,
        g=g,
        initial_state=initial_state,
        output_final_state=True,
        chunk_size=CHUNK,
        state_v_first=True,
        chunk_offsets=tables.chunk_starts,
        **places,
    )
    o = kernels.outputs(
        q=q,
        k=k,
        v=deltas,
        h=states,
        g=g,
        scale=q.shape[-1] ** -0.5,
        state_v_first=True,
        chunk_size=CHUNK,
        **places,
    )
    return o[0], final


def own_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    mixed_qkv: Tensor,
    recurrent_state: Tensor,
    conv_state: Tensor,
    tables: PrefillTables,
    *,
    block_v: int = 32,
    prepare_warps: int = 4,
    scan_warps: int = 4,
    stages: int = 2,
) -> Tensor:
    """The recurrence in two launches, from the prompts' states to the prompts' states.

    Args:
        q, k, v, g, beta: as in `chunked_rule`. mixed_qkv: the convolution's inputs, whose tails are kept.
        recurrent_state, conv_state: of all prompts.
    Returns:
        o: [T, HV, V].
    """
    T, H, K = q.shape
    HV, V = v.shape[1:]
    w, u, p = q.new_empty(T, HV, K), torch.empty_like(v), q.new_empty(T, HV, CHUNK)
    o = torch.empty_like(v)
    sizes = {"H": H, "HV": HV, "K": K, "V": V, "CHUNK": CHUNK}
    scale = K**-0.5
    chunk_prepare_kernel[(HV, tables.chunks.shape[0])](
        *(q, k, v, g, beta, w, u, p, tables.cu_seqlens, tables.chunks, scale),
        **sizes,
        BLOCK=CHUNK // 4,
        BLOCK_V=min(V, 64),
        num_warps=prepare_warps,
    )
    chunk_scan_kernel[(V // block_v, tables.prompts.shape[0] * HV)](
        *(q, k, w, u, p, g, o, recurrent_state, mixed_qkv, conv_state),
        *(tables.cu_seqlens, tables.prompts, tables.cached_lens, mixed_qkv.stride(0), scale),
        **sizes,
        BLOCK_V=block_v,
        KERNEL=conv_state.shape[2] + 1,
        SPLIT=recurrent_state.dim() == 5,
        CACHED=tables.num_keys > 0,
        num_warps=scan_warps,
        num_stages=stages,
    )
    return o


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
    """Convolution, SiLU, norms of q and k, and gates, in one launch: q, k, v, g and beta of `chunked_rule`."""
    H, HV, K, V = sizes
    T = mixed_qkv.shape[0]
    q, k, v = (mixed_qkv.new_empty(T, heads, size) for heads, size in ((H, K), (H, K), (HV, V)))
    g = torch.empty(T, HV, dtype=torch.float32, device=mixed_qkv.device)
    beta = torch.empty_like(g)
    conv_gates_prefill_kernel[(2 * H + HV + 1, tables.chunks.shape[0])](
        *(mixed_qkv, a, b, conv_weight, A_log, dt_bias, conv_state),
        *(tables.cu_seqlens, tables.prompts, tables.cached_lens, tables.chunks),
        *(q, k, v, g, beta, mixed_qkv.stride(0), a.stride(0), b.stride(0)),
        H=H,
        HV=HV,
        K=K,
        V=V,
        KERNEL=conv_weight.shape[1],
        CHUNK=CHUNK,
        BLOCK_K=triton.next_power_of_2(K),
        BLOCK_V=triton.next_power_of_2(V),
        BLOCK_HV=triton.next_power_of_2(HV),
        CACHED=tables.num_keys > 0,
        UPCAST=INTERPRETED,
        num_warps=8,
    )
    return q, k, v, g, beta


def load_states(recurrent_state: Tensor, tables: PrefillTables) -> Tensor:
    """The fp32 states [S, HV, V, K] that the sequences begin with."""
    split = recurrent_state.dim() == 5
    HV, (V, K) = recurrent_state.shape[1], recurrent_state.shape[-2:]
    S = tables.prompts.shape[0]
    states = torch.empty(S, HV, V, K, dtype=torch.float32, device=recurrent_state.device)
    row, block = HV * V * K, 4096
    load_states_kernel[(triton.cdiv(row, block), S)](
        recurrent_state, tables.prompts, tables.cached_lens, states,
        ROW=row, SIZE=V * K, BLOCK=block, SPLIT=split, num_warps=8,
    )  # fmt: skip
    return states


def store_states(
    final: Tensor, mixed_qkv: Tensor, recurrent_state: Tensor, conv_state: Tensor, tables: PrefillTables
) -> None:
    """Put final states and the convolutions' tails into the prompts' places."""
    V, K = recurrent_state.shape[-2:]
    row = recurrent_state.shape[1] * V * K
    C, tail = conv_state.shape[1:]
    block, block_c = 4096, 1024
    state_blocks = triton.cdiv(row, block)
    store_states_kernel[(state_blocks + triton.cdiv(C, block_c), tables.prompts.shape[0])](
        final, recurrent_state, mixed_qkv, conv_state, tables.cu_seqlens, tables.prompts, tables.cached_lens,
        mixed_qkv.stride(0), state_blocks,
        ROW=row, SIZE=V * K, C=C, KERNEL=tail + 1, BLOCK=block, BLOCK_C=block_c,
        SPLIT=recurrent_state.dim() == 5, CACHED=tables.num_keys > 0, num_warps=8,
    )  # fmt: skip


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
    Numerics: fp32 sums of 16-bit operands; normed keys, the chunks' states and their deltas are rounded to 16 bits, as
        fla-core does; deterministic. Its kernels are tuned on the first call in a process, which waits for the device.
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
    tune(sizes, mixed_qkv.dtype, mixed_qkv.device)
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
    if OWN:
        return own_rule(q, k, v, g, beta, mixed_qkv, recurrent_state, conv_state, tables, block_v=min(32, V))
    initial = load_states(recurrent_state, tables) if tables.num_keys else None
    o, final = chunked_rule(q, k, v, g, beta, initial, tables)
    store_states(final, mixed_qkv, recurrent_state, conv_state, tables)
    return o


def tune(sizes: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    """Let fla-core choose its configurations for these heads, on a usual size, once per process.

    It chooses on the first call, whatever its size; the first may be small, and must not be under capture.
    """
    key = (*sizes, dtype, device)
    if key in _tuned:
        return
    H, HV, K, V = sizes
    S, T = 4, 4 * TUNING_TOKENS
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.float32, generator=generator)

    q, k = (torch.nn.functional.normalize(random(T, H, K), dim=-1).to(dtype) for _ in range(2))
    v, beta = random(T, HV, V).to(dtype), random(T, HV).sigmoid()
    g = -random(T, HV).abs().view(-1, CHUNK, HV).cumsum(1).view(T, HV) * 0.1
    counts = torch.arange(S + 1, dtype=torch.int32, device=device)
    chunk = torch.arange(T // CHUNK, dtype=torch.int32, device=device)
    per_sequence = TUNING_TOKENS // CHUNK
    none = counts.new_empty(0)
    tables = PrefillTables(
        cu_seqlens=counts * TUNING_TOKENS,
        prompts=counts[:S],
        cached_lens=counts[:S],
        chunks=torch.stack([chunk // per_sequence, chunk % per_sequence], 1).contiguous(),
        chunk_starts=counts * per_sequence,
        page_rows=none,
        cu_keys=none,
        key_pages=none,
        prompt_rows=none,
        num_prompts=S,
        longest=TUNING_TOKENS,
        num_keys=0,
    )
    chunked_rule(q, k, v, g, beta, None, tables)
    _tuned.add(key)
