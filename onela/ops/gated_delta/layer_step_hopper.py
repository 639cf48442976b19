"""The layer step for Hopper (sm_90) in one launch: what it supports, and the cut of its rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from onela.ops._device import has_wgmma, multiprocessors
from onela.ops.gated_delta._layer_step_hopper_kernel import gated_delta_layer_step_hopper_kernel
from onela.ops.gated_delta.replay_hopper import (
    MAX_DEPTH,
    MAX_REQUESTS,
    HopperConfig,
    choose_hopper,
    rows_per_program,
    rows_readable,
)

KERNEL_SIZE = 4
HEAD_SIZE = 128
RING = 5
"""Stages in flight that fit twice into a multiprocessor, beside the state and the convolution's weights.

A tile of fewer stages has a ring of its own size: with a fixed place a stage needs no arithmetic.
"""


def supports_layer_hopper(
    mixed_qkv: Tensor,
    z: Tensor,
    *,
    conv_weight: Tensor,
    recurrent_state: Tensor,
    conv_state: Tensor,
    records_g: Tensor,
    records_delta: Tensor,
    records_k: Tensor,
    records_x: Tensor,
    ancestors: Tensor,
    prompts: Tensor,
    **_: Any,
) -> bool:
    """Whether `launch_layer_hopper` takes these tensors. Only looks at devices, dtypes, shapes and strides."""
    bf16 = torch.bfloat16
    if not has_wgmma(mixed_qkv.device):
        return False
    sizes = (
        records_k.shape[-1] == records_delta.shape[-1] == HEAD_SIZE and conv_weight.shape[1] == KERNEL_SIZE
    )
    sizes = sizes and ancestors.shape[1] <= MAX_DEPTH and prompts.shape[0] <= MAX_REQUESTS
    dtypes = all(
        x.dtype == bf16
        for x in (mixed_qkv, z, conv_weight, conv_state, recurrent_state, records_k, records_x)
    )
    dtypes = dtypes and recurrent_state.dim() == 5 and records_g.dtype == torch.float32
    dtypes = dtypes and records_delta.dtype in (bf16, torch.float32)
    return sizes and dtypes and rows_readable(mixed_qkv[:, None]) and rows_readable(z[:, None])


def launch_layer_hopper(
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
    config: HopperConfig | None = None,
) -> Tensor:
    """`gated_delta_layer_step_ref` in one launch, for tensors that `gated_delta_layer_step_triton` has checked.

    q, k and v stay in shared memory between the convolution and the replay. `config` is the cut of the rows, in
    tiles of 32; None picks it.

    Args:
        as in `gated_delta_layer_step_ref`, within what `supports_layer_hopper` says: bf16, K = V = 128, a window of
        4 inputs, a split state, at most 8 ancestors and 1024 requests; records_delta may be fp32.
    Returns:
        o: [N, HV*V] bf16.

    Writes: the four records at `slots`.
    Padding: as in `gated_delta_layer_step_ref`.
    Aliasing: as in `replay_step_hopper`; conv_state and depths too are read while the kernel before drains.
    Numerics: q, k and v are rounded to bf16 between the convolution and the replay; then as in `replay_step_hopper`.
        Without ancestors the gate's SiLU, before it multiplies the output in fp32, is off by up to 1e-5.
    """
    N = mixed_qkv.shape[0]
    H, HV = records_k.shape[1], records_delta.shape[1]
    B, T = prompts.shape[0], ancestors.shape[1]
    o = mixed_qkv.new_empty(N, HV * HEAD_SIZE)
    if N == 0:
        return o
    stages = stages_of_layer_tile(T, wide=records_delta.element_size() == 4)
    if config is None:
        sizes = (N, B, HV, HEAD_SIZE, HEAD_SIZE, stages, multiprocessors(mixed_qkv.device))
        config = replace(choose_hopper(*sizes, stored=6), ring=min(RING, stages))
    rows = rows_per_program(N, B, config)
    gated_delta_layer_step_hopper_kernel[(triton.cdiv(N, rows) * HV,)](
        *(mixed_qkv, z, a, b, conv_weight, A_log, dt_bias, norm_weight, recurrent_state, conv_state),
        *(records_g, records_delta, records_k, records_x, slots, ancestors, cu_rows, prompts, depths, o),
        *(N, B, rows, HEAD_SIZE**-0.5, norm_eps),
        *(mixed_qkv.stride(0), z.stride(0), a.stride(0), b.stride(0), ancestors.stride(0)),
        H=H,
        HV=HV,
        T=T,
        BPAD=max(32, triton.next_power_of_2(B)),
        NW=config.num_warps,
        RING=min(config.ring, 2 * stages),
        OVERLAP=config.overlap,
        num_warps=config.num_warps,
        launch_pdl=config.overlap,
    )
    return o


def stages_of_layer_tile(T: int, *, wide: bool) -> int:
    """Ring stages that one tile takes: three windows, T keys and deltas, the gate. `wide`: deltas are fp32."""
    return 3 * (min(T, KERNEL_SIZE - 1) + 1) + T * (3 if wide else 2) + 1
