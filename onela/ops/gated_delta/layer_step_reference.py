"""One decode step of a whole Gated DeltaNet layer, from its raw in-projection to the input of its out-projection."""

from __future__ import annotations

from torch import Tensor

from onela.ops._checks import check_float
from onela.ops.gated_delta.reference import gated_delta_gates, replay_step_ref
from onela.ops.indexing import RowIndex
from onela.ops.norm.reference import gated_rms_norm_ref
from onela.ops.short_conv.reference import short_conv_step_ref


def gated_delta_layer_step_ref(
    mixed_qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    *,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    recurrent_state: Tensor,
    conv_state: Tensor,
    records_g: Tensor,
    records_delta: Tensor,
    records_k: Tensor,
    records_x: Tensor,
    slots: Tensor,
    ancestors: Tensor,
    cu_rows: Tensor,
    prompts: Tensor,
    depths: Tensor,
) -> Tensor:
    """Short convolution, SiLU, gates, replay and gated RMSNorm of every beam; all four records are written.

    Args:
        mixed_qkv: [N, 2*H*K + HV*V], the raw projection: q heads, then k heads, then v heads.
        z: [N, HV*V], the output gate. b, a: [N, HV], raw write strength and raw decay.
        conv_weight: [2*H*K + HV*V, kernel_size]. A_log, dt_bias: [HV]. norm_weight: [V]. norm_eps: of the
            gated RMSNorm.
        recurrent_state: [num_prompts, HV, V, K] fp32, or its split form [num_prompts, HV, 2, V, K] bf16.
        conv_state: [num_prompts, 2*H*K + HV*V, kernel_size - 1].
        records_g: [num_slots, HV] fp32. records_delta: [num_slots, HV, V]. records_k: [num_slots, H, K].
        records_x: [num_slots, 2*H*K + HV*V], inputs of the convolution.
        slots, ancestors, cu_rows, prompts, depths: as in `replay_step_ref`.
    Returns:
        o: [N, HV*V] in mixed_qkv's dtype, ready for the out-projection.

    Writes: the four records at `slots`.
    Layout: rows of mixed_qkv, z, b and a may be strided (slices of one fused projection); the last axis is
        contiguous.
    Padding, Aliasing, Numerics: as in `replay_step_ref`; the replay's output stays fp32 up to the norm.
    """
    N = mixed_qkv.shape[0]
    H, K = records_k.shape[1:]
    HV, V = records_delta.shape[1:]
    check_float("mixed_qkv", mixed_qkv, N, 2 * H * K + HV * V)
    check_float("z", z, N, HV * V)
    check_float("b", b, N, HV)
    check_float("a", a, N, HV)
    index: RowIndex = {
        "slots": slots,
        "ancestors": ancestors,
        "cu_rows": cu_rows,
        "prompts": prompts,
        "depths": depths,
    }
    mixed = short_conv_step_ref(mixed_qkv, conv_weight, conv_state=conv_state, records_x=records_x, **index)
    q, k, v = mixed.split([H * K, H * K, HV * V], dim=-1)
    g, beta = gated_delta_gates(a, b, A_log=A_log, dt_bias=dt_bias)
    o = replay_step_ref(
        q.reshape(N, H, K),
        k.reshape(N, H, K),
        v.reshape(N, HV, V),
        g,
        beta,
        recurrent_state=recurrent_state,
        records_g=records_g,
        records_delta=records_delta,
        records_k=records_k,
        out_dtype=g.dtype,
        **index,
    )
    o = gated_rms_norm_ref(o, z.reshape(N, HV, V), norm_weight, eps=norm_eps)
    return o.reshape(N, HV * V).masked_fill((slots < 0)[:, None], 0)
