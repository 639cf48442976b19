"""Append-only rows of every layer: row `slot` is written once by the step that owns it, and never moves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onela.state.allocator import ExtentAllocator
from onela.state.geometry import GatedDeltaGeometry, LayerGeometry
from onela.state.pools import GrowingTensors


class Records:
    """The records of all layers, addressed by one slot number.

    A Gated DeltaNet layer keeps `x` (the convolution's input) if `conv_inputs` is set and `g`, `delta` and `k` if
    `transitions` is; a softmax layer keeps `k` and `v`. A request holds one extent of slots, `sum(beam widths)` long,
    its steps one after the other.

    Args:
        layers: geometry of each layer.
        dtype: the model's dtype, of `x`, of a transition's `k`, and of a softmax layer's `k` and `v`.
        record_dtype: dtype of `delta`.
        device: where the rows live.
        transitions: whether Gated DeltaNet layers keep their transitions here (for `replay` they do).
        conv_inputs: whether they keep the convolution's inputs here (for all backends but `records_moved` they do).
        max_slots: the most slots there may be; None for no limit.
    """

    def __init__(
        self,
        layers: Sequence[LayerGeometry],
        *,
        dtype: torch.dtype,
        record_dtype: torch.dtype,
        device: torch.device,
        transitions: bool = True,
        conv_inputs: bool = True,
        max_slots: int | None = None,
    ) -> None:
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for i, layer in enumerate(layers):
            if isinstance(layer, GatedDeltaGeometry):
                if conv_inputs:
                    shapes[f"{i}.x"] = ((layer.conv_dim,), dtype)
                if transitions:
                    shapes[f"{i}.g"] = ((layer.num_value_heads,), torch.float32)
                    shapes[f"{i}.delta"] = ((layer.num_value_heads, layer.value_dim), record_dtype)
                    shapes[f"{i}.k"] = ((layer.num_key_heads, layer.key_dim), dtype)
            else:
                shapes[f"{i}.k"] = ((layer.num_kv_heads, layer.head_dim), dtype)
                shapes[f"{i}.v"] = ((layer.num_kv_heads, layer.head_dim), dtype)
        self.slots = ExtentAllocator("record slots", max_slots)
        self.pool = GrowingTensors(shapes, device, limit=max_slots)

    def allocate(self, num_slots: int) -> int:
        """Take an extent of slots and return the first. Raises `CapacityError`."""
        start = self.slots.allocate(num_slots)
        try:
            self.pool.reserve(self.slots.end)
        except BaseException:  # no memory: the slots are as free as before
            self.slots.free(start, num_slots)
            raise
        return start

    def free(self, start: int, num_slots: int) -> None:
        """Give an extent back; its rows may be overwritten from now on."""
        self.slots.free(start, num_slots)

    def layer(self, index: int, name: str) -> Tensor:
        """The rows of one layer: `x`, `g`, `delta`, `k` or `v`, [num_slots, ...]."""
        return self.pool.tensors[f"{index}.{name}"]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.pool.nbytes
