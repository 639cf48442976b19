"""Joined products compile for sm_90 without a GPU, into the shared memory there is, and hardly spill."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
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
