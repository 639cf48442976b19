"""What prefill leaves for a prompt, shared by all its beams and read only from then on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from onela.errors import CapacityError
from onela.ops.gated_delta import split_state
from onela.state.allocator import ExtentAllocator, PageAllocator
from onela.state.geometry import AttentionGeometry, GatedDeltaGeometry, LayerGeometry
from onela.state.pools import GrowingTensors, grown_capacity

TABLE_STEP = 16
"""Columns by which the page table grows."""


@dataclass
class PromptState:
    """One prompt's place in the pool.

    Attributes:
        index: row of the per-prompt tensors.
        pages: KV pages in order.
        num_tokens: tokens prefilled so far.
        max_tokens: tokens that the pages have room for.
    """

    index: int
    pages: list[int]
    max_tokens: int
    num_tokens: int = field(default=0)


class PromptPool:
    """The state of all prompts, per layer.

    A Gated DeltaNet layer holds `recurrent_state` [num_prompts, HV, V, K] fp32 and `conv_state` [num_prompts,
    conv_dim, kernel_size - 1]; a softmax layer holds pages of keys and values [num_pages, page_size, HKV, D].

    Args:
        layers: geometry of each layer.
        dtype: the model's dtype, of the convolution tail and the keys and values.
        device: where the state lives.
        page_size: tokens per page.
        max_prompts, max_pages: the most there may be; None for no limit.
        split_states: keep recurrent states as two bf16 halves [num_prompts, HV, 2, V, K] (`split_state`): the same
            bytes, and tensor cores can take them as they are.
    """

    def __init__(
        self,
        layers: Sequence[LayerGeometry],
        *,
        dtype: torch.dtype,
        device: torch.device,
        page_size: int = 64,
        max_prompts: int | None = None,
        max_pages: int | None = None,
        split_states: bool = False,
    ) -> None:
        per_prompt: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        per_page: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for i, layer in enumerate(layers):
            if isinstance(layer, GatedDeltaGeometry):
                heads, state = layer.num_value_heads, (layer.value_dim, layer.key_dim)
                per_prompt[f"{i}.recurrent_state"] = (
                    ((heads, 2, *state), torch.bfloat16) if split_states else ((heads, *state), torch.float32)
                )
                per_prompt[f"{i}.conv_state"] = ((layer.conv_dim, layer.conv_kernel_size - 1), dtype)
            else:
                per_page[f"{i}.k"] = ((page_size, layer.num_kv_heads, layer.head_dim), dtype)
                per_page[f"{i}.v"] = ((page_size, layer.num_kv_heads, layer.head_dim), dtype)
        self.page_size = page_size
        self.device = device
        self.split_states = split_states
        self.has_pages = any(isinstance(layer, AttentionGeometry) for layer in layers)
        self.places = ExtentAllocator("prompt places", max_prompts)
        self.pages = PageAllocator("KV pages", max_pages)
        self.prompt_tensors = GrowingTensors(per_prompt, device, limit=max_prompts)
        self.page_tensors = GrowingTensors(per_page, device, limit=max_pages)
        self._views: dict[int, dict[str, list[Tensor]]] = {}
        self._views_made_for: object = None
        # What the host knows of every place; on a CPU that is all there is, a GPU has a copy.
        self._host_table = torch.full((0, 0), -1, dtype=torch.int32)
        self._host_lengths = torch.zeros(0, dtype=torch.int32)
        self._table, self._lengths = self._host_table.to(device), self._host_lengths.to(device)
        # Places whose length, and whose pages, have changed since the device was told.
        self._changed: tuple[int, int] | None = None
        self._allocated: tuple[int, int] | None = None

    def pages_needed(self, num_tokens: int) -> int:
        """Pages that a prompt of this length takes."""
        return -(-num_tokens // self.page_size) if self.has_pages else 0

    def fits(self, num_tokens: int, num_shared_pages: int = 0) -> bool:
        """Whether `allocate` would succeed now, for a prompt that brings `num_shared_pages` with it."""
        return self.places.fits(1) and self.pages.fits(self.pages_needed(num_tokens) - num_shared_pages)

    def allocate(self, num_tokens: int, shared_pages: Sequence[int] = ()) -> PromptState:
        """Take a place and the pages for a prompt of `num_tokens`.

        Args:
            shared_pages: full pages of a prompt with the same beginning; they become this prompt's first ones, and are
                never written by it.
        Raises:
            CapacityError: there is no room.
        """
        needed = self.pages_needed(num_tokens) - len(shared_pages)
        if not self.pages.fits(needed):
            raise CapacityError(
                f"KV pages: a prompt of {num_tokens} tokens needs {needed}, "
                f"{(self.pages.limit or 0) - self.pages.num_taken} are free"
            )
        index = self.places.allocate(1)
        self.pages.share(list(shared_pages))
        pages = [*shared_pages, *self.pages.allocate(needed)]
        needed = len(pages)
        try:
            self.prompt_tensors.reserve(self.places.end)
            self.page_tensors.reserve(self.pages.end)
            self.reserve_table(self.places.end, needed)
        except BaseException:  # no memory: place and pages are as free as before
            self.places.free(index, 1)
            self.pages.free(pages)
            raise
        row = self._host_table.numpy()[index]
        row[:needed] = pages
        row[needed:] = -1
        first, end = self._allocated or (index, index)
        self._allocated = min(first, index), max(end, index + 1)
        self._note_length(index, 0)
        return PromptState(index=index, pages=pages, max_tokens=num_tokens)

    def free(self, prompt: PromptState) -> None:
        """Give a prompt's place and pages back."""
        self.places.free(prompt.index, 1)
        self.pages.free(prompt.pages)

    def extend(self, prompt: PromptState, num_tokens: int) -> None:
        """Note that `num_tokens` more tokens have been prefilled."""
        if prompt.num_tokens + num_tokens > prompt.max_tokens:
            raise CapacityError(
                f"prompt {prompt.index}: {prompt.num_tokens} + {num_tokens} tokens, room for {prompt.max_tokens}"
            )
        prompt.num_tokens += num_tokens
        self._note_length(prompt.index, prompt.num_tokens)

    def _note_length(self, index: int, num_tokens: int) -> None:
        self._host_lengths.numpy()[index] = num_tokens
        first, end = self._changed or (index, index)
        self._changed = min(first, index), max(end, index + 1)

    @property
    def page_table(self) -> Tensor:
        """[num_prompts, most pages] int32 on the device: the pages of each place, in order; PAD behind them."""
        self.flush()
        return self._table

    @property
    def lengths(self) -> Tensor:
        """[num_prompts] int32 on the device: tokens that each place holds."""
        self.flush()
        return self._lengths

    def flush(self) -> None:
        """Tell the device what has changed in the tables since the last call; a graph that reads them needs it.

        Nobody waits, and what was handed to the device before still sees what it saw.
        """
        if self._changed is None:
            return
        changed, allocated = self._changed, self._allocated
        self._changed = self._allocated = None
        if self.device.type != "cuda":
            return
        rows = slice(*changed)
        self._lengths[rows].copy_(self._host_lengths[rows].pin_memory(), non_blocking=True)
        if allocated is not None:
            rows = slice(*allocated)
            self._table[rows].copy_(self._host_table[rows].pin_memory(), non_blocking=True)

    def snapshot(self, prompt: PromptState) -> dict[str, Tensor]:
        """A copy of what a prompt holds beside its pages: recurrent states and convolution tails as they are now.

        Returns:
            All layers' one after the other, [n] of each dtype.
        """
        return {name: torch.cat(rows) for name, rows in self._rows(prompt.index).items()}

    def restore(self, prompt: PromptState, snapshot: Mapping[str, Tensor], num_tokens: int) -> None:
        """Let a prompt go on from a snapshot that was taken after `num_tokens` tokens; its pages are in place."""
        for name, rows in self._rows(prompt.index).items():
            torch._foreach_copy_(rows, list(snapshot[name].split([row.numel() for row in rows])))
        self.extend(prompt, num_tokens)

    def _rows(self, index: int) -> dict[str, list[Tensor]]:
        """A place's part of every per-prompt tensor, flat, by dtype. Dozens of views, so they are kept."""
        if self._views_made_for != self.prompt_tensors.generation:
            self._views.clear()
            self._views_made_for = self.prompt_tensors.generation
        if index not in self._views:
            views: dict[str, list[Tensor]] = {}
            for tensor in self.prompt_tensors.tensors.values():
                views.setdefault(str(tensor.dtype), []).append(tensor[index].view(-1))
            self._views[index] = views
        return self._views[index]

    def read_pages(self, pages: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """Copies of pages, in order, on another device: [num_pages, page_size, HKV, D] per layer and kind."""
        index = torch.tensor(pages, dtype=torch.int64, device=self.device)
        return {name: tensor[index].to(device) for name, tensor in self.page_tensors.tensors.items()}

    def write_pages(self, pages: Sequence[int], contents: Mapping[str, Tensor]) -> None:
        """Fill pages with what `read_pages` gave."""
        index = torch.tensor(pages, dtype=torch.int64, device=self.device)
        for name, tensor in self.page_tensors.tensors.items():
            tensor[index] = contents[name].to(self.device)

    @cached_property
    def page_nbytes(self) -> int:
        """Bytes of one page, in all layers."""
        shapes = self.page_tensors.shapes.values()
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)

    @cached_property
    def snapshot_nbytes(self) -> int:
        """Bytes of one snapshot."""
        shapes = self.prompt_tensors.shapes.values()
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)

    def layer(self, index: int, name: str) -> Tensor:
        """`recurrent_state` or `conv_state` of one layer, [num_prompts, ...]."""
        return self.prompt_tensors.tensors[f"{index}.{name}"]

    def write_recurrent_states(self, index: int, prompts: Tensor, states: Tensor) -> None:
        """Keep [B, HV, V, K] states of one layer at these places."""
        kept = self.layer(index, "recurrent_state")
        kept[prompts] = split_state(states.to(torch.float32)) if self.split_states else states.to(kept.dtype)

    @property
    def generation(self) -> tuple[int, ...]:
        """Changes whenever a tensor of the pool is replaced by a larger one."""
        return (
            self.prompt_tensors.generation,
            self.page_tensors.generation,
            self._table.data_ptr(),
            *self._table.shape,
        )

    def cache(self, index: int) -> tuple[Tensor, Tensor]:
        """Key and value pages of one softmax layer, each [num_pages, page_size, HKV, D]."""
        return self.page_tensors.tensors[f"{index}.k"], self.page_tensors.tensors[f"{index}.v"]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return (
            self.prompt_tensors.nbytes + self.page_tensors.nbytes + self._table.nbytes + self._lengths.nbytes
        )

    def reserve_table(self, num_prompts: int, num_pages: int) -> None:
        """Make room for this many prompts of this many pages each in the page table."""
        rows, columns = self._host_table.shape
        if num_prompts <= rows and num_pages <= columns:
            return
        # As the pools grow, and by steps of pages: whoever holds a pointer is told rarely.
        if num_prompts > rows:
            num_prompts = grown_capacity(num_prompts, rows, self.places.limit)
        num_pages = -(-num_pages // TABLE_STEP) * TABLE_STEP
        grown = torch.full((max(rows, num_prompts), max(columns, num_pages)), -1, dtype=torch.int32)
        grown[:rows, :columns] = self._host_table
        lengths = torch.zeros(grown.shape[0], dtype=torch.int32)
        lengths[:rows] = self._host_lengths
        self._table, self._lengths = grown.to(self.device), lengths.to(self.device)
        self._host_table, self._host_lengths = grown, lengths
