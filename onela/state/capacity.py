"""Bytes that each backend holds and writes, by formula, and how many requests fit into a memory.

Two accountings stand side by side. The *published* one counts fp32 records and states, the prompt's state twice,
and one int32 index per record and head; other systems' figures are stated in it. The *own* one counts what OneLA
allocates: `delta` in `record_dtype`, the key as it came, the prompt's state once, and one ancestry index for all
heads and layers.

`pool_bytes` counts everything that the pools of `PromptPool`, `Records` and a backend allocate for equal requests, to
the byte; `max_requests` adds weights and workspace, and says how many fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from onela.errors import ConfigError
from onela.state.geometry import AttentionGeometry, GatedDeltaGeometry, LayerGeometry
from onela.state.prompt import TABLE_STEP
from onela.state.records import last_step_rows, own_slots, spare_needed

ARMS = ("replay", "full_state_copy", "full_state_read_parent", "replay_ssm", "replay_ssm_shared")
FIT_ARMS = (*ARMS, "replay_unfused", "records_moved")
"""Arms whose pools are counted: also the two that exist to be compared with."""
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


@dataclass(frozen=True)
class RequestSize:
    """What one request needs places for.

    Attributes:
        prompt_tokens: of its prompt. widths: beams after each chosen token, one number per token of a SID; as many as
            there can be (`BeamSearch.limit_widths`).
    """

    prompt_tokens: int
    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, value in (("prompt_tokens", self.prompt_tokens), ("widths", min(self.widths, default=0))):
            if value < 1:
                raise ConfigError(f"{name}: at least 1 is expected, got {value}")

    @property
    def num_slots(self) -> int:
        """Record slots of its own (`own_slots`)."""
        return own_slots(self.widths)

    @property
    def num_spare(self) -> int:
        """Rows of its last decode step, whose records share slots with other requests' (`last_step_rows`)."""
        return last_step_rows(self.widths)

    @property
    def num_rows(self) -> int:
        """Places for beams."""
        return max(self.widths)


@dataclass(frozen=True)
class ServedModel:
    """What a memory holds beside the pools, and the dtypes of the pools.

    Attributes:
        layers: geometry of each layer.
        weight_bytes: of the parameters and of the heads of the SID levels.
        row_bytes: activations of one row of a forward at their peak. num_codes: of the largest level.
        dtype: the model's. record_dtype: of `delta`. page_size: tokens per KV page.
        max_batch_rows, max_batch_tokens: most beams and prompt tokens in one forward.
    """

    layers: Sequence[LayerGeometry]
    weight_bytes: int = 0
    row_bytes: int = 0
    num_codes: int = 0
    dtype: torch.dtype = torch.bfloat16
    record_dtype: torch.dtype = torch.bfloat16
    page_size: int = 64
    max_batch_rows: int = 16384
    max_batch_tokens: int = 16384


@dataclass(frozen=True)
class Fit:
    """How many equal requests of one arm fit into a memory at the same time.

    Attributes:
        arm: one of `FIT_ARMS`. num_requests: as many as fit.
        parts: bytes by what they are for, with that many requests.
        request_bytes: what one request more would take in the pools.
    """

    arm: str
    num_requests: int
    parts: dict[str, int]
    request_bytes: int

    @property
    def total(self) -> int:
        """Bytes with `num_requests` requests."""
        return sum(self.parts.values())


RUNTIME_BYTES = 1 << 30
"""Kept free for what no formula knows: the CUDA context, the libraries' workspaces, the allocator's rounding."""

MOST_REQUESTS = 1 << 32


def pool_bytes(model: ServedModel, arm: str, request: RequestSize, num_requests: int) -> dict[str, int]:
    """Bytes that the pools hold for `num_requests` such requests, reserved at once: exactly what is allocated.

    Args:
        arm: one of `FIT_ARMS`.
    Returns:
        Bytes of `kv_pages`, `recurrent_states`, `conv_states`, `page_table`, `records` and `beam_states` (what all
        backends but `replay` hold per beam).
    Raises:
        ConfigError: the arm is unknown.
    """
    if arm not in FIT_ARMS:
        raise ConfigError(f"backend: {arm!r} is none of {', '.join(FIT_ARMS)}")
    linear = gated_delta_layers(model.layers)
    softmax = [layer for layer in model.layers if isinstance(layer, AttentionGeometry)]
    steps = len(request.widths) - 1
    pages = -(-request.prompt_tokens // model.page_size) if softmax else 0
    key_value = sum(2 * layer.num_kv_heads * layer.head_dim for layer in softmax) * model.dtype.itemsize
    states = sum(layer.state_numel for layer in linear) * FP32_BYTES
    tails = sum(layer.conv_dim * (layer.conv_kernel_size - 1) for layer in linear) * model.dtype.itemsize
    inputs = sum(layer.conv_dim for layer in linear) * model.dtype.itemsize
    transitions = sum(record_bytes(layer, model.dtype, model.record_dtype) for layer in linear)
    slot = key_value + (0 if arm == "records_moved" else inputs)
    if arm in ("replay", "replay_unfused"):
        slot += transitions
    beam = 0
    if arm.startswith("full_state"):
        beam = 2 * states
    elif arm.startswith("replay_ssm"):
        beam = steps * transitions + (states + INDEX_BYTES if arm == "replay_ssm" else 0)
    elif arm == "records_moved":
        beam = 2 * steps * (transitions + inputs)
    columns = -(-pages // TABLE_STEP) * TABLE_STEP
    each = {
        "kv_pages": pages * model.page_size * key_value,
        "recurrent_states": states,
        "conv_states": tails,
        "page_table": (columns + 1) * INDEX_BYTES,
        "records": request.num_slots * slot,
        "beam_states": request.num_rows * beam,
    }
    together = {name: num_requests * value for name, value in each.items()}
    together["records"] += spare_slots(model, request, num_requests) * slot
    return together


def spare_slots(model: ServedModel, request: RequestSize, num_requests: int) -> int:
    """Slots for the records of last steps: of as many rows as can take theirs in one forward."""
    return spare_needed(num_requests * request.num_spare, request.num_spare, model.max_batch_rows)


def workspace_bytes(model: ServedModel, request: RequestSize, num_requests: int) -> dict[str, int]:
    """Bytes that forwards and selections need while they run, as an estimate from above.

    Args:
        num_requests: requests that decode at a time; at most `max_batch_rows` of their beams share a forward, but
            requests before one level are selected together with them alone.
    Returns:
        Bytes of `weights`, `activations` (of a decode forward and of a prefill, whose chunks need as much again; both
        once as they are launched and once in the pools of the captured forwards), `logits` (fp32, and half as much
        again for what selection keeps of them) and `runtime`.
    """
    rows = max(request.num_rows, min(num_requests * request.num_rows, model.max_batch_rows))
    tokens = min(num_requests * request.prompt_tokens, model.max_batch_tokens)
    return {
        "weights": model.weight_bytes,
        "activations": 2 * (rows + 2 * tokens) * model.row_bytes,
        "logits": rows * model.num_codes * FP32_BYTES * 3 // 2,
        "runtime": RUNTIME_BYTES,
    }


def max_requests(model: ServedModel, arm: str, request: RequestSize, memory: int) -> Fit:
    """How many requests of this size fit into `memory` bytes at a time: weights, pools and workspace all counted.

    Raises:
        ConfigError: the arm is unknown.
    """

    def parts(count: int) -> dict[str, int]:
        return workspace_bytes(model, request, count) | pool_bytes(model, arm, request, count)

    def fits(count: int) -> bool:
        return sum(parts(count).values()) <= memory

    # Every part grows with the requests. A model without layers holds nothing for them: then any number fits.
    high = 1
    while high < MOST_REQUESTS and fits(high):
        high *= 2
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    more = sum(pool_bytes(model, arm, request, low + 1).values())
    return Fit(arm, low, parts(low), more - sum(pool_bytes(model, arm, request, low).values()))
