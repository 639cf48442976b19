"""Where the new tokens of packed prompts lie: tables that kernels read on the device, filled on the host in one piece.

A forward over prompts of any lengths runs in a shape with some room. Packed, unused prompts have no tokens, and the
tokens behind the last prompt form one more sequence, whose results go nowhere. In a rectangle every prompt has as many
tokens as the longest may have, and those behind its own form such a sequence: no table is needed to find a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

CHUNK = 64
"""Tokens of a chunk of the recurrence."""
BEHIND = 1 << 20
"""The number of a chunk that no sequence has."""


@dataclass(frozen=True)
class PrefillShape:
    """Sizes of a prefill forward, padding included.

    Attributes:
        num_tokens: T. num_prompts: B, the sequence of the padding tokens left out.
        longest: the most new tokens that a prompt may have.
        goes_on: whether a prompt may go on from a state of its own.
        rectangle: whether prompt n begins at token `n * longest`; then T is `B * longest`.
    """

    num_tokens: int
    num_prompts: int
    longest: int
    goes_on: bool = False
    rectangle: bool = False

    @property
    def num_sequences(self) -> int:
        """The prompts and the padding, which is one sequence, or one behind each prompt."""
        return 2 * self.num_prompts if self.rectangle else self.num_prompts + 1

    @property
    def num_chunks(self) -> int:
        """The most chunks that this many tokens in this many sequences can make."""
        return self.num_tokens // CHUNK + self.num_sequences


@dataclass(frozen=True)
class PrefillTables:
    """The tables of one forward, int32, on the device.

    Attributes:
        cu_seqlens: [S+1], new tokens of each sequence, padding among them.
        prompts: [S], places in the prompt pool, PAD for padding. cached_lens: [S], tokens that each holds already.
        chunks: [C, 2], sequence and number of each chunk of `CHUNK` tokens; what is left over lies past every end.
        chunk_starts: [S+1], the first chunk of each sequence.
        page_rows: [T], the row of the paged cache (page * page_size + place) where each token's keys go; PAD for none.
        counter: [1], where the programs of a launch draw their work from; zero between launches.
        num_prompts: B. longest: the most new tokens of a sequence.
        goes_on: whether a prompt may hold tokens already.
        rectangle: whether prompt n begins at token `n * longest`.
    """

    cu_seqlens: Tensor
    prompts: Tensor
    cached_lens: Tensor
    chunks: Tensor
    chunk_starts: Tensor
    page_rows: Tensor
    counter: Tensor
    num_prompts: int
    longest: int
    goes_on: bool
    rectangle: bool = False


@dataclass(frozen=True)
class NewTokens:
    """What a prompt brings to a forward.

    Attributes:
        token_ids: int32. cached: tokens that its state holds already. place: in the prompt pool.
        pages: its KV pages, in order; none for a model without softmax layers.
    """

    token_ids: np.ndarray[Any, np.dtype[np.int32]]
    cached: int
    place: int
    pages: Sequence[int]


class TableLayout:
    """How the tables of a shape lie in one int32 buffer, with the tokens, their positions and the prompts' last rows.

    Args:
        shape: sizes. page_size: tokens of a KV page.
    """

    def __init__(self, shape: PrefillShape, page_size: int) -> None:
        self.shape = shape
        self.page_size = page_size
        T, B, S = shape.num_tokens, shape.num_prompts, shape.num_sequences
        sizes = {
            "token_ids": T,
            "positions": T,
            "page_rows": T,
            "cu_seqlens": S + 1,
            "prompts": S,
            "cached_lens": S,
            "last_rows": B,
            "chunks": 2 * shape.num_chunks,
            "chunk_starts": S + 1,
            "counter": 1,
        }
        self.places: dict[str, tuple[int, int]] = {}
        self.size = 0
        for name, size in sizes.items():
            self.places[name] = (self.size, self.size + size)
            # Every part begins at a multiple of 16 bytes: kernels are compiled for that once.
            self.size += -(-size // 4) * 4

    def part(self, flat: Any, name: str) -> Any:
        """One table of a buffer, flat."""
        start, end = self.places[name]
        return flat[start:end]

    def tables(self, flat: Tensor) -> PrefillTables:
        """The tables of a buffer on the device."""
        parts = {
            name: self.part(flat, name)
            for name in self.places
            if name not in ("token_ids", "positions", "last_rows")
        }
        parts["chunks"] = parts["chunks"].view(-1, 2)
        shape = self.shape
        return PrefillTables(
            **parts,
            num_prompts=shape.num_prompts,
            longest=shape.longest,
            goes_on=shape.goes_on,
            rectangle=shape.rectangle,
        )

    def host(self, prompts: Sequence[NewTokens], *, pin: bool = False) -> Tensor:
        """The buffer of these prompts, on the host.

        Args:
            prompts: at most B, whose tokens fit into the shape.
            pin: make it a buffer that a GPU can fetch.
        """
        shape, page_size = self.shape, self.page_size
        host = torch.empty(self.size, dtype=torch.int32, pin_memory=pin)
        numbers = host.numpy()
        numbers[:] = 0
        part = {name: numbers[start:end] for name, (start, end) in self.places.items()}
        part["page_rows"][:] = -1
        # Which prompt each sequence is (None: padding), and its new tokens.
        used: list[NewTokens | None] = [*prompts, *[None] * (shape.num_prompts - len(prompts))]
        counts = [0 if prompt is None else len(prompt.token_ids) for prompt in used]
        if shape.rectangle:
            sequences = [x for prompt in used for x in (prompt, None)]
            lengths = [n for count in counts for n in (count, shape.longest - count)]
        else:
            sequences, lengths = [*used, None], [*counts, shape.num_tokens - sum(counts)]
        part["cu_seqlens"][:] = list(accumulate(lengths, initial=0))
        part["prompts"][:] = [-1 if prompt is None else prompt.place for prompt in sequences]
        part["cached_lens"][:] = [0 if prompt is None else prompt.cached for prompt in sequences]
        starts = list(accumulate((-(-length // CHUNK) for length in lengths), initial=0))
        part["chunk_starts"][:] = starts
        chunks = part["chunks"].reshape(-1, 2)
        chunks[:] = (len(sequences) - 1, BEHIND)
        ends = (prompt.cached + len(prompt.token_ids) for prompt in prompts)
        counting = np.arange(max(page_size, starts[-1], *ends), dtype=np.int32)
        row, asked = 0, []
        for i, (prompt, length) in enumerate(zip(sequences, lengths)):
            if length:
                of_sequence = chunks[starts[i] : starts[i + 1]]
                of_sequence[:, 0] = i
                of_sequence[:, 1] = counting[: len(of_sequence)]
            if prompt is not None:
                end = prompt.cached + length
                rows = slice(row, row + length)
                part["token_ids"][rows] = prompt.token_ids
                part["positions"][rows] = counting[prompt.cached : end]
                if len(prompt.pages):
                    # The rows of every page that new tokens lie on, one page after the other.
                    first = prompt.cached // page_size
                    pages = np.array(prompt.pages[first : -(-end // page_size)], dtype=np.int32)
                    on_pages = np.add.outer(pages * page_size, counting[:page_size]).reshape(-1)
                    part["page_rows"][rows] = on_pages[prompt.cached - first * page_size :][:length]
                asked.append(max(row + length - 1, 0))
            row += length
        part["last_rows"][: len(asked)] = asked
        return host
