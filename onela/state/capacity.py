"""Bytes that each backend holds and writes, by formula.

Two accountings stand side by side. The *published* one counts fp32 records and states, the prompt's state twice,
and one int32 index per record and head; other systems' figures are stated in it. The *own* one counts what OneLA
allocates: `delta` in `record_dtype`, the key as it came, the prompt's state once, and one ancestry index for all
heads and layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from onela.state.geometry import GatedDeltaGeometry, LayerGeometry

ARMS = ("replay", "full_state_copy", "full_state_read_parent", "replay_ssm", "replay_ssm_shared")
INDEX_BYTES = 4
FP32_BYTES = 4


@dataclass(frozen=True)
class Capacity:
    """What one arm needs for a batch, in bytes.

    Attributes:
        arm: one of `ARMS`.
        persistent: held for all requests while they decode: the prompts' recurrent states and what the beams remember.
        written_per_step: written by one decode step of all requests at full width.
    """

    arm: str
    persistent: int
    written_per_step: int


@dataclass(frozen=True)
class Workload:
    """A batch of equal requests.

    Attributes:
        num_requests: R. beam_width: W. num_steps: T, decode calls; one less than the tokens of a SID.
    """

    num_requests: int
    beam_width: int
    num_steps: int


def gated_delta_layers(layers: Sequence[LayerGeometry]) -> list[GatedDeltaGeometry]:
    """The layers that hold recurrent states."""
    return [layer for layer in layers if isinstance(layer, GatedDeltaGeometry)]


def published_capacity(layers: Sequence[LayerGeometry], workload: Workload) -> list[Capacity]:
    """FullState with copy on reorder, and replay, under the published accounting."""
    rows = workload.num_requests * workload.beam_width
    replay = full = replay_written = full_written = 0
    for layer in gated_delta_layers(layers):
        state = layer.state_numel * FP32_BYTES
        record = layer.num_value_heads * ((layer.value_dim + layer.key_dim + 1) * FP32_BYTES + INDEX_BYTES)
        replay += 2 * workload.num_requests * state + rows * workload.num_steps * record
        full += 2 * rows * state
        replay_written += rows * record
        full_written += 2 * rows * state
    return [Capacity("replay", replay, replay_written), Capacity("full_state_copy", full, full_written)]


def own_capacity(
    layers: Sequence[LayerGeometry],
    workload: Workload,
    *,
    dtype: torch.dtype = torch.bfloat16,
    record_dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
) -> list[Capacity]:
    """Every arm as OneLA allocates it.

    Args:
        layers: geometry of each layer of the model; softmax layers do not count.
        workload: the batch.
        dtype: the model's, of the key records. record_dtype: of `delta`. state_dtype: of the beams' full states.
    """
    rows, steps = workload.num_requests * workload.beam_width, workload.num_steps
    own = gated_delta_layers(layers)
    prompts = workload.num_requests * sum(layer.state_numel * FP32_BYTES for layer in own)
    states = rows * sum(layer.state_numel * state_dtype.itemsize for layer in own)
    checkpoints = rows * sum(layer.state_numel * FP32_BYTES for layer in own)
    record = sum(record_bytes(layer, dtype, record_dtype) for layer in own)
    index = rows * steps * INDEX_BYTES
    return [
        Capacity("replay", prompts + rows * steps * record + index, rows * record + index),
        Capacity("full_state_copy", prompts + 2 * states, 2 * states),
        Capacity("full_state_read_parent", prompts + 2 * states, states),
        Capacity(
            "replay_ssm",
            prompts + checkpoints + rows * (steps * record + INDEX_BYTES),
            rows * (steps * record + record + INDEX_BYTES),
        ),
        Capacity("replay_ssm_shared", prompts + rows * steps * record, rows * steps * record + rows * record),
    ]


def record_bytes(layer: GatedDeltaGeometry, dtype: torch.dtype, record_dtype: torch.dtype) -> int:
    """Bytes of one row's transition record in one layer: g, delta and k."""
    return (
        layer.num_value_heads * FP32_BYTES
        + layer.num_value_heads * layer.value_dim * record_dtype.itemsize
        + layer.num_key_heads * layer.key_dim * dtype.itemsize
    )
