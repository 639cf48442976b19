"""The kernels of prefill compile for Hopper without one, for the heads of Qwen3.5, and do not spill."""

from __future__ import annotations

import pytest

from tests.ops.compile_only import resources

pytest.importorskip("triton")

PACKAGE = "onela.ops.gated_delta."
FLOATS = ("p_g", "p_beta", "p_A_log", "p_dt_bias")
TABLES = ("p_cu_seqlens", "p_prompts", "p_cached_lens", "p_chunks")
ROWS = (
    "p_x",
    "p_a",
    "p_b",
    "p_weight",
    "p_conv_state",
    "p_q",
    "p_k",
    "p_v",
    "p_w",
    "p_u",
    "p_p",
    "p_o",
    "p_states",
)
TYPES = (
    dict.fromkeys(FLOATS, "*fp32")
    | dict.fromkeys(TABLES, "*i32")
    | dict.fromkeys(ROWS, "*bf16")
    | {"scale": "fp32"}
)
HEADS = {"H": 16, "HV": 16, "K": 128, "V": 128, "CHUNK": 64}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "kernel", "warps", "constants"),
    [
        (
            "_prefill_kernel",
            "conv_gates_prefill_kernel",
            4,
            {
                "KERNEL": 4,
                "ROWS": 16,
                "BLOCK_K": 128,
                "BLOCK_V": 128,
                "BLOCK_HV": 16,
                "CACHED": True,
                "UPCAST": False,
            },
        ),
        ("_chunk_kernel", "chunk_prepare_kernel", 4, {"LEVELS": 6, "BLOCK_V": 64}),
        (
            "_chunk_kernel",
            "chunk_scan_kernel",
            4,
            {"BLOCK_V": 64, "KERNEL": 4, "SPLIT": True, "CACHED": True},
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_kernels_compile_without_spilling(
    module: str, kernel: str, warps: int, constants: dict[str, int]
) -> None:
    stack, _, shared = resources(PACKAGE + module, kernel, 90, warps, dict(TYPES), HEADS | constants)
    assert stack == 0
    assert shared <= 227 * 1024
