"""The joined product compiles without a GPU, into the shared memory there is and without spills."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from onela.ops.linear.swiglu_hopper import BLOCK_K, BLOCK_M, BLOCK_N, GROUP_M, SKEW, STAGES
from tests.ops.compile_only import resources


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
