"""Both attention kernels compile without a GPU, into the shared memory there is and with few spills."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from onela.ops.attention import prefill_hopper
from onela.ops.attention.decode_hopper import LAUNCH
from tests.ops.compile_only import resources

HALF = (
    "p_q", "p_k", "p_v", "p_k_cache", "p_v_cache", "p_records_k", "p_records_v",
)  # fmt: skip
INDEX = ("p_page_table", "p_prompt_lens", "p_slots", "p_ancestors", "p_cu_rows", "p_prompts", "p_depths")
TYPES = dict.fromkeys(HALF, "*bf16") | dict.fromkeys(INDEX, "*i32") | {"scale_log2": "fp32"}
DESCRIPTOR = {"swizzle_byte_width": 128, "element_bitwidth": 16, "rank": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("splits", "fused", "D", "G", "stack"),
    [(1, False, 256, 4, 64), (2, True, 256, 4, 64), (4, False, 128, 2, 16), (1, False, 64, 3, 0)],
)
def test_hopper_kernel(splits: int, fused: bool, D: int, G: int, stack: int) -> None:
    """What spills is the gathering warps'; those that compute keep all but a few scalars in registers."""
    stages, held, registers, loader_registers = LAUNCH[D]
    constants = {
        "HKV": 2,
        "G": G,
        "D": D,
        "PAGE": 64,
        "OWN": 64 // G if 64 % G == 0 else 63 // G + 2,
        "BLOCK_B": 32,
    }
    constants |= {"SPLITS": splits, "FUSED": fused, "STAGES": stages, "HELD": held, "REGISTERS": registers}
    constants |= {"LOADER_REGISTERS": loader_registers}
    types = TYPES | {"p_o": "*bf16"} | {name: ([64, D], DESCRIPTOR) for name in ("k_desc", "v_desc")}
    if 64 % G == 0:
        types["q_desc"] = ([64 // G, G, D], {**DESCRIPTOR, "rank": 3})
    else:
        constants["q_desc"] = None
    given = {"p_part_o": "*fp32", "p_part_lse": "*fp32"} if splits > 1 else {}
    given |= {"p_flags": "*i32"} if fused else {}
    types |= given
    constants |= {name: None for name in ("p_part_o", "p_part_lse", "p_flags") if name not in given}
    module = "onela.ops.attention._decode_hopper_kernel"
    used = resources(module, "beam_attention_hopper_kernel", 90, 4, types, constants)
    assert used[0] <= stack
    assert used[2] <= 227 * 1024


@pytest.mark.slow
@pytest.mark.parametrize(("D", "HQ", "G"), [(128, 16, 2), (256, 8, 4), (64, 8, 8)])
def test_prompt_kernel(D: int, HQ: int, G: int) -> None:
    """No more than a few scalars of a thread are kept on the stack."""
    unit, stages, queries = prefill_hopper.LAUNCH[D]
    registers, loader_registers = prefill_hopper.REGISTERS
    constants = {"HQ": HQ, "G": G, "D": D, "UNIT": unit, "STAGES": stages, "QUERIES": queries}
    constants |= {"REGISTERS": registers, "LOADER_REGISTERS": loader_registers}
    types = dict.fromkeys(("p_cu_seqlens", "p_chunks", "p_chunk_starts", "p_counter"), "*i32")
    types |= {"p_o": "*bf16", "scale_log2": "fp32", "q_desc": ([prefill_hopper.ROWS, D], DESCRIPTOR)}
    types |= {name: ([unit, D], DESCRIPTOR) for name in ("k_desc", "v_desc")}
    module = "onela.ops.attention._prefill_hopper_kernel"
    used = resources(module, "prompt_attention_hopper_kernel", 90, 4, types, constants)
    assert used[0] <= 32
    assert used[2] <= 227 * 1024


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "block_n", "shared_kib"), [(80, 32, 163), (90, 64, 227), (100, 64, 227)]
)
def test_portable_kernel(capability: int, block_n: int, shared_kib: int) -> None:
    constants = {"HKV": 2, "G": 4, "D": 128, "BLOCK_D": 128, "PAGE": 64, "BLOCK_M": 128, "BLOCK_N": block_n}
    constants |= {"OWN": 32, "SPLITS": 2, "BLOCK_B": 4, "FP32_DOT": False}
    types = TYPES | {"p_o": "*fp32", "p_part_lse": "*fp32"}
    used = resources(
        "onela.ops.attention.decode", "beam_attention_decode_kernel", capability, 8, types, constants
    )
    assert used[0] <= 128
    assert used[2] <= shared_kib * 1024


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "block_m", "splits", "block_n", "shared_kib"),
    [
        (80, 128, 4, 32, 163),
        (90, 128, 4, 64, 227),
        (90, 128, 1, 64, 227),
        (90, 16, 32, 64, 227),
        (100, 128, 4, 64, 227),
    ],
)
def test_kernel_over_pages(capability: int, block_m: int, splits: int, block_n: int, shared_kib: int) -> None:
    constants = {
        "HKV": 2,
        "G": 4,
        "D": 256,
        "PAGE": 64,
        "LAST": block_m < 128,
        "SPLITS": splits,
        "BLOCK_S": 8,
    }
    constants |= {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": 256, "UPCAST": False}
    types = dict.fromkeys(("p_q", "p_k_cache", "p_v_cache", "p_o"), "*bf16") | {"scale_log2": "fp32"}
    types |= dict.fromkeys(("p_page_table", "p_prompts", "p_cached_lens", "p_cu_seqlens"), "*i32")
    parts = ("p_part_o", "p_part_m", "p_part_l")
    if splits == 1:
        constants |= dict.fromkeys(parts)
    else:
        types |= dict.fromkeys(parts, "*fp32")
    module, warps = "onela.ops.attention._prefill_kernel", 8 if block_m == 128 else 4
    used = resources(module, "pages_attention_kernel", capability, warps, types, constants)
    assert used[0] <= (64 if capability == 90 else 640)
    assert used[2] <= shared_kib * 1024
