"""What all warps of the Hopper attention kernel know: tiles, and the stages of the ring between them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Rows of a warpgroup, keys of a unit of the prompt, keys of a warpgroup's own unit.
ROWS = gl.constexpr(64)
UNIT = gl.constexpr(64)
OWN_UNIT = gl.constexpr(32)
# What the gathering warps tell a computing warpgroup about a tile.
N_PROMPT, N_OWN, FIRST_OWN, LIMIT, START, ROW0, WIDTH = (gl.constexpr(i) for i in range(7))
NUM_INFO = gl.constexpr(8)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def stage_at(place, STAGES: gl.constexpr):
    """The stage of a place in the sequence of all, and the parity of the times that it has been filled before."""
    return place % STAGES, (place // STAGES) & 1


@gluon.jit
def _tiles(p_cu_rows, B, G: gl.constexpr, BLOCK_B: gl.constexpr):
    """Each request's number, its first row, the row past its last, and its tiles."""
    LIST: gl.constexpr = gl.BlockedLayout([BLOCK_B // 32], [32], [gl.num_warps()], [0])
    o_b = gl.arange(0, BLOCK_B, layout=LIST)
    low = gl.load(p_cu_rows + o_b, mask=o_b < B, other=0)
    high = gl.load(p_cu_rows + o_b + 1, mask=o_b < B, other=0)
    return o_b, low, high, ((high - low) * G + 2 * ROWS - 1) // (2 * ROWS)


@gluon.jit
def count_items(batch, HKV: gl.constexpr, G: gl.constexpr, SPLITS: gl.constexpr, BLOCK_B: gl.constexpr):
    """Tiles of all requests, and what the programs share among themselves: tiles by head and split."""
    _o_b, _low, _high, tiles = _tiles(batch[2], batch[6], G, BLOCK_B)
    num_tiles = gl.sum(tiles, 0)
    return num_tiles, num_tiles * HKV * SPLITS


@gluon.jit
def tile_at(
    item, num_tiles, batch, HKV: gl.constexpr, G: gl.constexpr, OWN: gl.constexpr, SPLITS: gl.constexpr,
    BLOCK_B: gl.constexpr,
):  # fmt: skip
    """Where an item's rows stand, and which units of its prompt and of the beams' own keys are its split's."""
    p_page_table, p_prompt_lens, p_cu_rows, p_prompts, p_depths, stride_table, B = batch
    o_b, low, high, tiles = _tiles(p_cu_rows, B, G, BLOCK_B)
    prompts = gl.load(p_prompts + o_b, mask=o_b < B, other=-1)
    depths = gl.load(p_depths + o_b, mask=o_b < B, other=0)
    ends = gl.associative_scan(tiles, 0, _add)
    tile = item % gl.maximum(num_tiles, 1)
    i_h = (item // gl.maximum(num_tiles, 1)) % HKV
    i_s = item // gl.maximum(num_tiles * HKV, 1)
    here = (ends > tile) & (ends - tiles <= tile)
    start = (tile - gl.sum(gl.where(here, ends - tiles, 0), 0)) * (2 * ROWS)
    row0 = gl.sum(gl.where(here, low, 0), 0)
    width = gl.sum(gl.where(here, high - low, 0), 0)
    prompt = gl.sum(gl.where(here, prompts, 0), 0).to(gl.int64)
    depth = gl.sum(gl.where(here, depths, 0), 0)
    served = prompt >= 0
    length = gl.load(p_prompt_lens + prompt, mask=served, other=0)
    # An own unit counts as half of a unit of the prompt.
    has_tail = (length % UNIT > 0).to(gl.int32)
    in_prompt = length // UNIT + has_tail
    halves = 2 * in_prompt + ((depth + 1) * OWN + OWN_UNIT - 1) // OWN_UNIT
    low = halves * i_s // SPLITS
    high = halves * (i_s + 1) // SPLITS
    first = gl.minimum((low + 1) // 2, in_prompt)
    num_prompt = gl.minimum((high + 1) // 2, in_prompt) - first
    first_own = gl.maximum(low - 2 * in_prompt, 0)
    num_own = gl.maximum(high - 2 * in_prompt, 0) - first_own
    # The first unit is the incomplete one, or all unseen where there is nothing else.
    limit = gl.where(num_prompt == 0, 0, gl.where(first < has_tail, length % UNIT, UNIT))
    num_prompt = gl.maximum(num_prompt, 1)
    rows = (start, row0, width, gl.where(served, width, 0), depth, i_h, i_s)
    pages = (p_page_table + prompt * stride_table, first, has_tail, length // UNIT, limit)
    return rows, pages, num_prompt, num_own, first_own
