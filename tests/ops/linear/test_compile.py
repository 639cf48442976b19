"""Joined products compile for sm_90 without a GPU, into the shared memory there is, and hardly spill."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from onela.ops.linear import float8_hopper
from onela.ops.linear.float8_hopper import AT_END, BLOCK, BY_ROWS, EVERY_BLOCK, STAGE
from onela.ops.linear.float8_hopper import WIDE as NO_SCALES
from onela.ops.linear.gated_hopper import PIECE, STAGES, WIDE
from onela.ops.linear.joined_hopper import ADDED, DEPTH, GATED, HEADS, PLAIN, Tile, launch_sizes
from tests.ops.compile_only import Job, resources, resources_of_all

FP32 = ("p_h", "p_squares", "p_sums", "p_cos", "p_sin")
BF16 = ("p_norm", "p_q_norm", "p_k_norm")
NUMBERS = ("width", "eps", "head_eps")
TYPES = dict.fromkeys(FP32, "*fp32") | dict.fromkeys(BF16, "*bf16") | dict.fromkeys(NUMBERS, "fp32")
CASES = [
    (PLAIN, Tile(2, 256), 16, 0),
    (PLAIN, Tile(1, 64), 0, 0),
    (GATED, Tile(2, 256), 16, 0),
    (ADDED, Tile(2, 256), 0, 0),
    (ADDED, Tile(2, 128), 0, 0),
    (HEADS, Tile(1, 128), 16, 0),
    (HEADS, Tile(1, 256), 16, 0),
    (HEADS, Tile(2, 256), 0, 0),
]


def job(mode: int, tile: Tile, parts: int) -> Job:
    step, out, stages = launch_sizes(mode, tile)
    descriptors = {
        "x_desc": ([64 * tile.groups, DEPTH], DEPTH),
        "w_desc": ([step, DEPTH], DEPTH),
        "o_desc": ([64, out], out),
    }
    types: dict = dict(TYPES)
    for name, (block, columns) in descriptors.items():
        swizzle = min(128, 2 * columns)
        types[name] = (block, {"swizzle_byte_width": swizzle, "element_bitwidth": 16, "rank": 2})
    constants = {"STAGES": stages, "MODE": mode, "PARTS": parts, "GROUPS": tile.groups, "BN": tile.columns}
    constants |= {"BO": out, "CENTERED": True, "REGISTERS": 232}
    constants["KIND"] = (8, 2, 1, min(32, tile.columns // 2)) if mode == HEADS else None
    return ("onela.ops.linear._joined_hopper_kernel", "joined_product_hopper_kernel", 90, 4, types, constants)


@pytest.mark.slow
def test_joined_product_hopper_kernel() -> None:
    used = resources_of_all([job(mode, tile, parts) for mode, tile, parts, _ in CASES])
    for (mode, tile, _, stack), (spilled, _, shared) in zip(CASES, used):
        assert spilled <= stack, (mode, tile)
        assert shared <= 227 * 1024, (mode, tile)


@pytest.mark.slow
def test_gated_product_hopper_kernel() -> None:
    types: dict = dict(TYPES)
    descriptors = {"x_desc": (128, 64), "w_wide_desc": (WIDE, 64), "w_piece_desc": (PIECE, 64)}
    for name, block in (descriptors | {"o_wide_desc": (64, WIDE), "o_piece_desc": (64, PIECE)}).items():
        layout = {"swizzle_byte_width": min(128, 2 * block[1]), "element_bitwidth": 16, "rank": 2}
        types[name] = (list(block), layout)
    constants = {"STAGES": STAGES, "PARTS": 32, "REGISTERS": 232}
    module = "onela.ops.linear._gated_hopper_kernel"
    spilled, _, shared = resources(module, "gated_product_hopper_kernel", 90, 4, types, constants)
    assert spilled == 0
    assert shared <= 227 * 1024


FLOAT8_CASES = [
    (mode, scales, tile)
    for mode, tiles in float8_hopper.TILES.items()
    for tile in tiles
    for scales in {PLAIN: [EVERY_BLOCK, AT_END], ADDED: [EVERY_BLOCK, NO_SCALES]}.get(mode, [EVERY_BLOCK])
    if scales == EVERY_BLOCK or tile.split == BY_ROWS
]


def float8_job(mode: int, scales: int, tile: float8_hopper.Tile) -> Job:
    step, stages, buffers = float8_hopper.launch_sizes(mode, tile, blocks=scales == EVERY_BLOCK)
    bits = 16 if scales == NO_SCALES else 8
    depth, out = 8 * STAGE // bits, 8 if mode in (GATED, ADDED) else 16
    blocks = {"x_desc": (tile.rows, depth, bits), "w_desc": (step, depth, bits), "o_desc": (64, BLOCK, out)}
    types: dict = dict(TYPES) | dict.fromkeys(("p_x_scales", "p_w_scales", "p_o_scales"), "*fp32")
    for name, (rows, columns, width) in blocks.items():
        swizzle = min(128, columns * width // 8)
        types[name] = ([rows, columns], {"swizzle_byte_width": swizzle, "element_bitwidth": width, "rank": 2})
    types["s_desc"] = ([tile.rows], {"swizzle_byte_width": 0, "element_bitwidth": 32, "rank": 1})
    constants = {"STAGES": stages, "MODE": mode, "SCALES": scales, "PARTS": 0 if mode == ADDED else 8}
    constants |= {"GROUPS": tile.groups, "SPLIT": tile.split, "BN": tile.columns, "BUFFERS": buffers}
    constants |= {"CENTERED": True, "REGISTERS": 232}
    module = "onela.ops.linear._float8_hopper_kernel"
    return (module, "float8_product_hopper_kernel", 90, 4, types, constants)


@pytest.mark.slow
def test_float8_product_hopper_kernel() -> None:
    for case, used in zip(FLOAT8_CASES, resources_of_all([float8_job(*case) for case in FLOAT8_CASES])):
        spilled, _, shared = used
        assert spilled == 0, case
        assert shared <= 227 * 1024, case
