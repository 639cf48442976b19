"""The decode step of a whole Gated DeltaNet layer: one launch where a Hopper GPU can, else two."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from onela.errors import DtypeError
from onela.ops._checks import check_float, check_groups, check_shape
from onela.ops._device import has_wgmma
from onela.ops.gated_delta._checks import check_layout, check_records, check_size, check_state, check_step
from onela.ops.gated_delta._conv_gates_kernel import conv_gates_kernel
from onela.ops.gated_delta._launch import INTERPRETED, choose_splits
from onela.ops.gated_delta.replay import choose_replay, launch_replay
from onela.ops.norm import gated_rms_norm


def gated_delta_layer_step_triton(
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
    """Short convolution, SiLU, gates, replay and gated RMSNorm of every beam: `gated_delta_layer_step_ref`'s contract.

    On a Hopper GPU one launch takes what `supports_layer_hopper` says. Else `launch_pair`.

    Args:
        as in `gated_delta_layer_step_ref`; floats are bf16, fp16 or fp32; K and V are powers of two from 16 to 512.
        records_x and records_k have mixed_qkv's dtype.
    Returns:
        o: [N, HV*V] in mixed_qkv's dtype, ready for the out-projection.

    Writes: the four records at `slots`.
    Layout: rows of mixed_qkv, z, b and a may be strided; the last axis is contiguous; all else is contiguous.
    Padding, Aliasing, Numerics: as in `replay_step_ref`; the replay's output stays fp32 up to the norm.
    Raises: ShapeError, DtypeError.
    """
    N = mixed_qkv.shape[0]
    H, K = records_k.shape[1:]
    HV, V = records_delta.shape[1:]
    check_groups(HV, H)
    check_size("K", K)
    check_size("V", V)
    C = 2 * H * K + HV * V
    check_layer_rows(mixed_qkv, z, b, a, C=C, HV=HV, V=V)
    check_layer_weights(conv_weight, A_log, dt_bias, norm_weight, conv_state, records_x, C=C, HV=HV, V=V)
    check_records(records_g, records_delta, records_k, H=H, HV=HV, K=K, V=V)
    check_state(recurrent_state, HV=HV, K=K, V=V)
    check_step(N, slots, ancestors, cu_rows, prompts, depths)
    for name, tensor in {"records_x": records_x, "records_k": records_k, "z": z}.items():
        if tensor.dtype != mixed_qkv.dtype:
            raise DtypeError(f"{name}: expected mixed_qkv's {mixed_qkv.dtype}, got {tensor.dtype}")
    if N == 0:
        return mixed_qkv.new_empty(0, HV * V)
    layer: dict[str, Any] = {
        "conv_weight": conv_weight,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "norm_weight": norm_weight,
        "norm_eps": norm_eps,
        "recurrent_state": recurrent_state,
        "conv_state": conv_state,
        "records_g": records_g,
        "records_delta": records_delta,
        "records_k": records_k,
        "records_x": records_x,
        "slots": slots,
        "ancestors": ancestors,
        "cu_rows": cu_rows,
        "prompts": prompts,
        "depths": depths,
    }
    if mixed_qkv.is_cuda:
        # Imported late: the interpreter must not see Gluon.
        from onela.ops.gated_delta.layer_step_hopper import launch_layer_hopper, supports_layer_hopper

        if supports_layer_hopper(mixed_qkv, z, **layer):
            return launch_layer_hopper(mixed_qkv, z, b, a, **layer)
    return launch_pair(mixed_qkv, z, b, a, **layer)


def launch_pair(
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
    """The layer step in two launches, for tensors that `gated_delta_layer_step_triton` has checked.

    The first launch writes the inputs' and the keys' records and leaves q, v and the gates to the second, which replays
    and normalises. A head whose state is too large for one program takes a third, for the norm.
    """
    N = mixed_qkv.shape[0]
    H, K = records_k.shape[1:]
    HV, V = records_delta.shape[1:]
    qv, g, beta = launch_conv_gates(
        *(mixed_qkv, b, a, conv_weight, A_log, dt_bias, conv_state, records_x, records_k),
        *(slots, ancestors, cu_rows, prompts, depths),
        HV=HV,
    )
    q, v = qv[:, : H * K].unflatten(1, (H, K)), qv[:, H * K :].unflatten(1, (HV, V))
    replay: dict[str, Any] = {
        "recurrent_state": recurrent_state,
        "records_g": records_g,
        "records_delta": records_delta,
        "records_k": records_k,
    }
    index: dict[str, Any] = {
        "slots": slots,
        "ancestors": ancestors,
        "cu_rows": cu_rows,
        "prompts": prompts,
        "depths": depths,
    }
    hopper = q.is_cuda and _on_hopper(q, v, g, beta, ancestors=ancestors, prompts=prompts, **replay)
    if hopper:
        from onela.ops.gated_delta.replay_hopper import launch_hopper, rows_readable

        fused = V == 128 and rows_readable(z.unflatten(1, (HV, V)))
        launch: Callable[..., Tensor] = launch_hopper
    else:
        fused = choose_replay(K, V, q.dtype, q.device).block_v == V
        launch = launch_replay
    o = launch(
        *(q, None, v, g, beta),
        **replay,
        **index,
        scale=None,
        out_dtype=mixed_qkv.dtype if fused else torch.float32,
        config=None,
        norm=(z, norm_weight, norm_eps) if fused else None,
    )
    if not fused:
        # Rows without a slot are zeros, and stay zeros under the norm.
        o = gated_rms_norm(o, z.unflatten(1, (HV, V)), norm_weight, eps=norm_eps)
    return o.reshape(N, HV * V)


def _on_hopper(q: Tensor, v: Tensor, g: Tensor, beta: Tensor, **tensors: Any) -> bool:
    """Whether the Hopper kernel takes the second launch. Imported late: the interpreter must not see Gluon."""
    from onela.ops.gated_delta.replay_hopper import supports_hopper

    return supports_hopper(q, None, v, g, beta, **tensors)


def launch_conv_gates(
    mixed_qkv: Tensor,
    b: Tensor,
    a: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    conv_state: Tensor,
    records_x: Tensor,
    records_k: Tensor,
    slots: Tensor,
    ancestors: Tensor,
    cu_rows: Tensor,
    prompts: Tensor,
    depths: Tensor,
    *,
    HV: int,
    block_w: int = 8,
    num_warps: int = 2,
    programs_per_sm: int = 64,
    max_channels: int = 256,
) -> tuple[Tensor, Tensor, Tensor]:
    """The first launch: writes records_x and records_k, returns q and v side by side, and g and beta."""
    N, C = mixed_qkv.shape
    QK = records_k[0].numel()
    block_c = math.gcd(QK, C - 2 * QK, max_channels)
    qv = mixed_qkv.new_empty(N, C - QK)
    g = torch.empty(N, HV, dtype=torch.float32, device=mixed_qkv.device)
    beta = torch.empty_like(g)
    B, blocks, depth = prompts.shape[0], C // block_c, ancestors.shape[1]
    num_splits = choose_splits(
        N, B, blocks, block_w=block_w, programs_per_sm=programs_per_sm, device=mixed_qkv.device
    )
    conv_gates_kernel[(num_splits, blocks, B + 1)](
        *(mixed_qkv, a, b, conv_weight, A_log, dt_bias, conv_state, records_x, records_k),
        *(slots, ancestors, cu_rows, prompts, depths, qv, g, beta),
        *(N, B, num_splits, mixed_qkv.stride(0), a.stride(0), b.stride(0), ancestors.stride(0)),
        QK=QK,
        C=C,
        HV=HV,
        KERNEL=conv_weight.shape[1],
        MAX_DEPTH=min(depth, conv_weight.shape[1] - 1),
        BLOCK_W=block_w,
        BLOCK_C=block_c,
        BLOCK_HV=triton.next_power_of_2(HV),
        OVERLAP=has_wgmma(mixed_qkv.device),
        UPCAST=INTERPRETED,
        num_warps=num_warps,
    )
    return qv, g, beta


def check_layer_rows(mixed_qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, *, C: int, HV: int, V: int) -> None:
    """Refuse projections of a wrong shape or layout."""
    N = mixed_qkv.shape[0]
    check_float("mixed_qkv", mixed_qkv, N, C)
    check_float("z", z, N, HV * V)
    check_float("b", b, N, HV)
    check_float("a", a, N, HV)
    for name, tensor in {"mixed_qkv": mixed_qkv, "z": z, "b": b, "a": a}.items():
        check_layout(name, tensor)


def check_layer_weights(
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_state: Tensor,
    records_x: Tensor,
    *,
    C: int,
    HV: int,
    V: int,
) -> None:
    """Refuse weights and convolution inputs of a wrong shape or layout."""
    check_float("conv_weight", conv_weight, C, None)
    check_float("A_log", A_log, HV)
    check_float("dt_bias", dt_bias, HV)
    check_float("norm_weight", norm_weight, V)
    check_float("records_x", records_x, None, C)
    check_shape("conv_state", conv_state, None, C, conv_weight.shape[1] - 1)
    contiguous = {
        "conv_weight": conv_weight,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "norm_weight": norm_weight,
        "conv_state": conv_state,
        "records_x": records_x,
    }
    for name, tensor in contiguous.items():
        check_layout(name, tensor, contiguous=True)
