"""Joined products compile for sm_90 without a GPU, into the shared memory there is, and hardly spill."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from onela.ops.linear.joined_hopper import ADDED, DEPTH, GATED, PLAIN, Tile, launch_sizes
from onela.ops.linear.swiglu_hopper import BLOCK_K, BLOCK_M, BLOCK_N, GROUP_M, SKEW, STAGES
from tests.ops.compile_only import Job, resources, resources_of_all

TYPES = {"p_h": "*fp32", "p_norm": "*bf16", "p_squares": "*fp32", "p_sums": "*fp32", "width": "fp32"}
CASES = [
    # Registers may hold all but some bytes of a residual's widest tile.
    (PLAIN, Tile(2, 256), 16, 0),
    (PLAIN, Tile(1, 64), 0, 0),
    (GATED, Tile(2, 256), 16, 0),
    (ADDED, Tile(2, 128), 0, 40),
    (ADDED, Tile(1, 64), 0, 0),
]


def job(mode: int, tile: Tile, parts: int) -> Job:
    step, out, stages = launch_sizes(mode, tile)
    descriptors = {
        "x_desc": ([64 * tile.groups, DEPTH], DEPTH),
        "w_desc": ([step, DEPTH], DEPTH),
        "o_desc": ([64, out], out),
    }
    types: dict = TYPES | {"eps": "fp32"}
    for name, (block, columns) in descriptors.items():
        swizzle = min(128, 2 * columns)
        types[name] = (block, {"swizzle_byte_width": swizzle, "element_bitwidth": 16, "rank": 2})
    constants = {"STAGES": stages, "MODE": mode, "PARTS": parts, "GROUPS": tile.groups, "BN": tile.columns}
    constants |= {"BO": out, "CENTERED": True, "REGISTERS": 232}
    return ("onela.ops.linear._joined_hopper_kernel", "joined_product_hopper_kernel", 90, 4, types, constants)


@pytest.mark.slow
def test_hopper_kernel() -> None:
    layout = {"swizzle_byte_width": 128, "element_bitwidth": 16, "rank": 2}
    half = BLOCK_N // 2
    blocks = {"x_desc": [BLOCK_M, BLOCK_K], "w_desc": [half, BLOCK_K], "o_desc": [BLOCK_M // 2, half]}
    constants = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K, "STAGES": STAGES}
    constants |= {"GROUP_M": GROUP_M, "SKEW": SKEW}
    module, types = "onela.ops.linear._swiglu_hopper_kernel", {n: (b, layout) for n, b in blocks.items()}
    stack, _, shared = resources(module, "linear_swiglu_hopper_kernel", 90, 4, types, constants)
    assert stack == 0
    assert shared <= 227 * 1024


@pytest.mark.slow
def test_joined_product_hopper_kernel() -> None:
    used = resources_of_all([job(mode, tile, parts) for mode, tile, parts, _ in CASES])
    for (mode, tile, _, stack), (spilled, _, shared) in zip(CASES, used):
        assert spilled <= stack, (mode, tile)
        assert shared <= 227 * 1024, (mode, tile)
