"""Append-only rows of every layer: row `slot` is written once by the step that owns it, and never moves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onela.errors import CapacityError
from onela.state.allocator import ExtentAllocator
from onela.state.geometry import GatedDeltaGeometry, LayerGeometry
from onela.state.pools import GrowingTensors


def own_slots(widths: Sequence[int]) -> int:
    """Record slots that a request of these beam widths takes: one per beam and decode step, the last step apart."""
    return sum(widths[:-2])


def last_step_rows(widths: Sequence[int]) -> int:
    """Rows of its last decode step: their records are read by nobody, and go to spare slots."""
    return widths[-2] if len(widths) > 1 else 0


def spare_needed(total: int, widest: int, max_batch_rows: int) -> int:
    """Spare slots for `total` rows in their last steps, at most `widest` of one request: as many as fit a forward."""
    return min(total, max(max_batch_rows, widest))


class Records:
    """The records of all layers, addressed by one slot number.

    A Gated DeltaNet layer keeps `x` (the convolution's input) if `conv_inputs` is set and `g`, `delta` and `k` if
    `transitions` is; a softmax layer keeps `k` and `v`. A request holds one extent of slots, its steps one after the
    other, as long as the beams of all its decode steps but the last: the records of the last step are read by nobody.
    They are written to *spare* slots, which belong to no request and are used again by the next forward.

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
        self.spare_start, self.spare_size = 0, 0
        self.pool = GrowingTensors(shapes, device, limit=max_slots)

    def free(self, start: int, num_slots: int) -> None:
        """Give an extent back; its rows may be overwritten from now on."""
        self.slots.free(start, num_slots)

    def fits(self, num_slots: int, num_spare: int) -> bool:
        """Whether `admit` would succeed now."""
        return self._plan(num_slots, num_spare) is not None

    def admit(self, num_slots: int, num_spare: int) -> int:
        """Take an extent of slots, and see to it that there are so many spare ones.

        Args:
            num_slots: of the request that is admitted. num_spare: rows that may be in their last step in one forward,
                the request's among them.
        Returns:
            The first slot of the extent; 0 when it is empty.
        Raises:
            CapacityError: there is no room.
        """
        plan = self._plan(num_slots, num_spare)
        if plan is None:
            raise CapacityError(
                f"{self.slots.name}: {num_slots} adjoining places and {num_spare} spare ones asked for, "
                f"{(self.slots.limit or 0) - self.slots.num_taken} of {self.slots.limit} free"
            )
        start, spare_start, spare_size = plan
        before = self.spare_start, self.spare_size
        self._move_spare(spare_start, spare_size)
        if num_slots:
            self.slots.take(start, num_slots)
        try:
            self.pool.reserve(self.slots.end)
        except BaseException:  # no memory: the slots are as free as before
            if num_slots:
                self.slots.free(start, num_slots)
            self._move_spare(*before)
            raise
        return start

    def free_spare(self) -> None:
        """Give the spare slots back, when no request is left that could use them."""
        self._move_spare(0, 0)

    def _plan(self, num_slots: int, num_spare: int) -> tuple[int, int, int] | None:
        """Start of an extent, and start and size of the spare slots: as they are if they do, else anew."""
        if self.spare_size >= num_spare:
            kept = self.slots.planned([num_slots])
            if kept is not None:
                return kept[0], self.spare_start, self.spare_size
        old = (self.spare_start, self.spare_size)
        # Twice as many as before, so that they move rarely; fewer where there is no room for that.
        for size in (max(num_spare, 2 * self.spare_size), num_spare):
            anew = self.slots.planned([size, num_slots], without=old)
            if anew is not None:
                return anew[1], anew[0], size
        return None

    def _move_spare(self, start: int, size: int) -> None:
        """Nothing is copied: what a spare slot holds is never read."""
        if self.spare_size:
            self.slots.free(self.spare_start, self.spare_size)
        if size:
            self.slots.take(start, size)
        self.spare_start, self.spare_size = start, size

    def layer(self, index: int, name: str) -> Tensor:
        """The rows of one layer: `x`, `g`, `delta`, `k` or `v`, [num_slots, ...]."""
        return self.pool.tensors[f"{index}.{name}"]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.pool.nbytes
