"""Which backend `recurrent_backend="auto"` means: replay, unless SIDs are so long that full states pay."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onela.config import RecurrentBackendName
from onela.state.capacity import FP32_BYTES, gated_delta_layers, record_bytes
from onela.state.geometry import LayerGeometry

REPLAYED_BYTE_COST = 1.6
"""Time of a gathered record byte over that of a state byte, where no two beams share an ancestor.

From `bench/results/crossover.jsonl` (one H200, operator, R=4 W=256, H=HV=16, K=V=128): a record of 1,024 rows, 8.45 MB,
adds 2.9 us to a step (t = 63 to 255, tree "chain"), and 2.15 GB of states read and written take 460 us. With random
parents it is 1.1 to 1.3.
"""


def replay_share(
    layers: Sequence[LayerGeometry],
    *,
    num_levels: int,
    beam_width: int,
    dtype: torch.dtype = torch.bfloat16,
    record_dtype: torch.dtype = torch.bfloat16,
) -> float:
    """Time of replay over that of full states read from the parent, for all decode steps of a request, by their bytes.

    With `T = num_levels - 1` steps, records of `r` bytes and states of `S`, a beam's step t gathers t records, writes
    one, and reads its share of the prompt's state; a full state is written at every step and read at all but the first,
    where the prompt's is:

        replay = cost * T (T - 1) / 2 * r + T * (r + S / W)        full = (2 T - 1) * S + S / W

    Both are linear in the beams but for the `S / W`, so the width decides only where it is small. Returns 0 for a model
    without recurrent layers.
    """
    own = gated_delta_layers(layers)
    if not own:
        return 0.0
    steps = max(1, num_levels - 1)
    record = sum(record_bytes(layer, dtype, record_dtype) for layer in own)
    state = sum(layer.state_numel for layer in own) * FP32_BYTES
    gathered = REPLAYED_BYTE_COST * steps * (steps - 1) / 2 * record
    full = (2 * steps - 1) * state + state / beam_width
    return (gathered + steps * (record + state / beam_width)) / full


def choose_backend(
    layers: Sequence[LayerGeometry],
    *,
    num_levels: int,
    beam_width: int,
    dtype: torch.dtype = torch.bfloat16,
    record_dtype: torch.dtype = torch.bfloat16,
) -> RecurrentBackendName:
    """`replay` while it takes no more time than `full_state` that reads the parent, by `replay_share`.

    Args:
        layers: geometry of each layer of the model. num_levels: tokens of a SID. beam_width: beams of a usual request.
        dtype: the model's. record_dtype: of `delta`.
    """
    share = replay_share(
        layers, num_levels=num_levels, beam_width=beam_width, dtype=dtype, record_dtype=record_dtype
    )
    return "replay" if share <= 1 else "full_state"
