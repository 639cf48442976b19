"""Packs new tokens of prompts into the tensors of one prefill forward, with room for padding behind them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate

import torch

from onela.engine.scheduler import PrefillChunk
from onela.ops.indexing import to_device
from onela.ops.prefill_tables import NewTokens, PrefillShape, TableLayout
from onela.state import PrefillInputs, PromptPool

FINE_FROM = 1024
"""From here on buckets are a sixteenth of a power of two apart, below an eighth."""
TIGHT = 8
"""Beyond `FINE_FROM` tight buckets are so many tokens apart."""
SMALLEST = 64
"""Tokens of the smallest bucket."""
SLACK = 96
"""So many tokens of padding are always worth not to capture another shape: a short forward takes no time for them."""
FEW_PROMPTS = 4
"""So many prompts share one shape, whatever the length of the longest."""
LONG = 512
"""Shorter prompts are not worth a rectangle."""


def new_tokens(chunk: PrefillChunk) -> NewTokens:
    """What a piece of a prompt brings to a forward."""
    prompt = chunk.request.prompt
    assert prompt is not None, "a scheduled request holds a place in the prompt pool"
    tokens = chunk.request.prompt_token_ids[chunk.start : chunk.end]
    return NewTokens(tokens, chunk.start, prompt.index, prompt.pages)


def exact_shape(chunks: Sequence[PrefillChunk]) -> PrefillShape:
    """The sizes of these chunks' forward, without any room."""
    lengths = [chunk.end - chunk.start for chunk in chunks]
    goes_on = any(chunk.start for chunk in chunks)
    return PrefillShape(
        sum(lengths), len(chunks), max(lengths), goes_on, rectangle=len(chunks) == 1 and not goes_on
    )


def padded_prefill_shape(shape: PrefillShape, *, tight: bool = False) -> PrefillShape:
    """The shape that stands for all with a little fewer tokens or prompts; if `tight`, for those with very few less.

    A single new prompt is a rectangle, and so are a few of nearly the same length: then attention is faster.
    Tokens are padded by at most a sixteenth (an eighth below 1024, or to the next 32), prompts to a power of four; a
    single one that goes on has a shape of its own.
    """
    T = bucket(shape.num_tokens, tight=tight)
    side = bucket(shape.longest, tight=tight)
    few = shape.num_prompts <= FEW_PROMPTS and side >= LONG and shape.num_prompts * side <= T + T // 16
    if not shape.goes_on and (shape.num_prompts == 1 or few):
        return PrefillShape(shape.num_prompts * side, shape.num_prompts, side, rectangle=True)
    B = 1 if shape.num_prompts == 1 else FEW_PROMPTS
    while shape.num_prompts > B:
        B *= 4
    longest = T if B <= FEW_PROMPTS else min(T, _power_of_two(max(shape.longest, T - shape.num_tokens)))
    return PrefillShape(T, B, longest, shape.goes_on)


def fits(room: PrefillShape, shape: PrefillShape) -> bool:
    """Whether a forward of the exact sizes `shape` can run in the padded shape `room`."""
    if shape.num_tokens > room.num_tokens:
        return False
    if room.rectangle:
        alike = shape.num_prompts == room.num_prompts and not shape.goes_on
        return alike and shape.longest <= room.longest
    padding = room.num_tokens - shape.num_tokens
    if shape.num_prompts > room.num_prompts or max(shape.longest, padding) > room.longest:
        return False
    return room.goes_on or not shape.goes_on


def holds(room: PrefillShape, shape: PrefillShape) -> bool:
    """Whether it can at little cost."""
    ample = max(shape.num_tokens * 9 // 8, shape.num_tokens + SLACK)
    return room.num_tokens <= ample and fits(room, shape)


def stand_in(captured: Iterable[PrefillShape], shape: PrefillShape) -> PrefillShape | None:
    """The least of the captured shapes that holds a forward of the exact sizes `shape`; None if there is none."""
    fitting = [room for room in captured if holds(room, shape)]
    return min(fitting, key=lambda room: (room.num_tokens, not room.rectangle, room.goes_on), default=None)


def shape_for(captured: Collection[PrefillShape], shape: PrefillShape) -> PrefillShape:
    """The padded shape in which a forward of the exact sizes `shape` is to run, captured already or not.

    One that is captured for it is tight: whatever is asked for first, and perhaps again, carries no padding. Where a
    captured shape holds it at little cost it runs in that. And where the next smaller one is near, lengths may be
    growing one by one, and the new shape is to hold the next ones too.
    """
    tight = padded_prefill_shape(shape, tight=True)
    if tight in captured:
        return tight
    found = stand_in(captured, shape)
    if found is not None:
        return found
    near = (
        room.num_prompts == tight.num_prompts
        and room.goes_on == tight.goes_on
        and room.rectangle == tight.rectangle
        and tight.num_tokens * 8 // 9 <= room.num_tokens < tight.num_tokens
        for room in captured
    )
    return padded_prefill_shape(shape) if any(near) else tight


def bucket(num_tokens: int, *, tight: bool = False) -> int:
    """The tokens that a forward of so many is padded to."""
    if num_tokens <= SMALLEST:
        return SMALLEST
    if tight and num_tokens > FINE_FROM:
        return -(-num_tokens // TIGHT) * TIGHT
    step = _step(num_tokens)
    return -(-num_tokens // step) * step


def _step(num_tokens: int) -> int:
    """Tokens from the bucket that holds so many to the one before."""
    return max(SMALLEST // 2, _power_of_two(num_tokens) // (32 if num_tokens > FINE_FROM else 16))


def buckets_up_to(num_tokens: int) -> list[int]:
    """Buckets of which one holds any number of tokens up to `num_tokens` (see `holds`).

    Beyond `FINE_FROM` they are all that there are: a forward then has 2 % of padding on average, and there a percent of
    the time counts more than another graph does.
    """
    found, end = [bucket(num_tokens)], bucket(num_tokens)
    while end > SLACK:
        if end > FINE_FROM:
            end -= _step(end)
        else:
            # The least number that this bucket still holds; the next one must hold what is below.
            least = min(end - SLACK, -(-end * 8 // 9))
            end = bucket(least - 1) if bucket(least - 1) < end else end - SMALLEST
        found.append(end)
    return sorted(found)


class PrefillBuffers:
    """The tensors of a prefill forward of one shape. Fresh ones are all padding.

    Args:
        shape: their sizes. prompts: the pool whose places and pages are written. device: where they live.
    """

    def __init__(self, shape: PrefillShape, prompts: PromptPool, device: torch.device) -> None:
        self.shape = shape
        self.layout = TableLayout(shape, prompts.page_size)
        self.flat = to_device(self.layout.host([]), device)

    def inputs(self) -> PrefillInputs:
        """The forward that these buffers describe; the same tensors every time. Nothing of it is on the host."""
        tables = self.layout.tables(self.flat)
        return PrefillInputs(
            token_ids=self.layout.part(self.flat, "token_ids"),
            positions=self.layout.part(self.flat, "positions"),
            cu_seqlens=tables.cu_seqlens,
            prompts=tables.prompts,
            cached_lens=tables.cached_lens,
            last_rows=self.layout.part(self.flat, "last_rows"),
            tables=tables,
        )

    def fill(self, chunks: Sequence[PrefillChunk]) -> None:
        """Describe a forward of these chunks, which fit into the shape. Nobody waits for the device."""
        host = self.layout.host([new_tokens(chunk) for chunk in chunks], pin=self.flat.is_cuda)
        self.flat.copy_(host, non_blocking=True)


def eager_inputs(chunks: Sequence[PrefillChunk], prompts: PromptPool, device: torch.device) -> PrefillInputs:
    """The forward of these chunks as it is, with what references read left on the host."""
    layout = TableLayout(exact_shape(chunks), prompts.page_size)
    tokens = [new_tokens(chunk) for chunk in chunks]
    flat = to_device(layout.host(tokens), device)
    bounds = list(accumulate((chunk.end - chunk.start for chunk in chunks), initial=0))
    return PrefillInputs(
        token_ids=layout.part(flat, "token_ids"),
        positions=layout.part(flat, "positions"),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        prompts=torch.tensor([new.place for new in tokens], dtype=torch.int32),
        cached_lens=torch.tensor([chunk.start for chunk in chunks], dtype=torch.int32),
        last_rows=layout.part(flat, "last_rows"),
        tables=layout.tables(flat) if device.type == "cuda" else None,
    )


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
