"""The small kernels compile for sm_80, sm_90 and sm_100 without a GPU and do not spill; no kernel is left out."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
from tests.ops.compile_only import ROOT, Job, resources_of_all

BF16 = "*bf16"
ROW = {"D": 256, "BLOCK_R": 16, "BLOCK_D": 256}
PREFILL_INDEX = dict.fromkeys(("p_cu_seqlens", "p_prompts", "p_cached_lens"), "*i32")
PARTS = dict.fromkeys(("p_part_o", "p_part_m", "p_part_l"), "*fp32")
PAGES = {"SIZE": 512, "BLOCK_R": 16, "BLOCK_D": 512}
FLOAT8 = {"p_o": "*fp8e4nv", "p_scales": "*fp32"}
FLOAT8_ROW = {"LARGEST": 448.0, "BLOCK_D": 4096}
CONV_INDEX = dict.fromkeys(("p_slots", "p_ancestors", "p_cu_rows", "p_prompts", "p_depths"), "*i32")
BEAM_LINES = (
    "beams tokens cu_rows cu_out first_rows first_slots prompts depths lengths token_starts fields ancestors"
)
BEAM_TABLES = dict.fromkeys(
    (f"p_{name}" for name in f"{BEAM_LINES} hidden_starts rows parents codes".split()), "*i32"
)
BEAM_TABLES |= {
    "p_nodes": "*i64",
    "p_hidden_rows": "*i64",
    "p_children": "*i64",
    "p_finite": "*i1",
    "p_cum": "*fp32",
}
BEAM_ROWS = {"SIZE": 20, "BLOCK_N": 32, "STEPS": 3}
KERNELS: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "rms_norm_kernel": (
        "norm.kernels", 4, {"eps": "fp32"}, ROW | {"CENTERED": True, "RESIDUAL": True, "OVERLAP": False}
    ),
    "gated_rms_norm_kernel": ("norm.kernels", 4, {"eps": "fp32"}, ROW),
    "rotary_angles_kernel": (
        "norm.kernels", 4, {"p_positions": "*i32"} | dict.fromkeys(("p_frequencies", "p_cos", "p_sin"), "*fp32"),
        {"HALF": 32, "BLOCK": 256},
    ),
    "rotary_kernel": ("norm.kernels", 4, {}, ROW | {"HALF": 32}),
    "swiglu_kernel": ("norm.kernels", 4, {}, {"BLOCK": 4096}),
    "sigmoid_gate_kernel": ("norm.kernels", 4, {}, ROW | {"OVERLAP": False}),
    "qk_norm_rotary_kernel": (
        "norm.qk_kernel", 4, {"eps": "fp32", "p_page_rows": "*i32"},
        {"HQ": 8, "HKV": 2, "D": 256, "HALF": 32, "BLOCK_D": 256, "BLOCK_Q": 8, "BLOCK_K": 2, "CENTERED": True}
        | {"PAGES": True, "OVERLAP": False},
    ),
    "short_conv_step_kernel": (
        "short_conv.kernels", 4, CONV_INDEX, {"KERNEL": 4, "MAX_DEPTH": 3, "BLOCK_C": 1024, "BLOCK_B": 16}
    ),
    "beam_attention_merge_kernel": (
        "attention.decode", 4, {"p_part_o": "*fp32", "p_part_lse": "*fp32", "p_cu_rows": "*i32"},
        {"HQ": 8, "D": 256, "BLOCK_H": 8, "BLOCK_D": 256, "SPLITS": 4, "OVERLAP": False},
    ),
    "reorder_states_kernel": ("gated_delta._full_state_kernel", 8, {"p_parents": "*i32"}, {"BLOCK": 8192}),
    "gates_kernel": (
        "gated_delta.gates", 2, dict.fromkeys(("p_A_log", "p_dt_bias", "p_g", "p_beta"), "*fp32"),
        {"HV": 16, "BLOCK_N": 32, "BLOCK_HV": 16},
    ),
    "load_states_kernel": (
        "gated_delta._prefill_kernel", 8, {"p_prompts": "*i32", "p_cached_lens": "*i32", "p_o": "*fp32"},
        {"ROW": 262144, "SIZE": 16384, "BLOCK": 4096, "SPLIT": True},
    ),
    "store_states_kernel": (
        "gated_delta._prefill_kernel", 8, PREFILL_INDEX | {"p_final": "*fp32"},
        {"ROW": 262144, "SIZE": 16384, "C": 6144, "KERNEL": 4, "BLOCK": 4096, "BLOCK_C": 1024}
        | {"SPLIT": True, "CACHED": True},
    ),
    "write_pages_kernel": (
        "attention._prefill_kernel", 4, {"p_page_rows": "*i32"}, PAGES
    ),
    "last_row_kernel": (
        "attention._prefill_kernel", 4, PARTS | {"p_cu_seqlens": "*i32", "scale_log2": "fp32"},
        {"HKV": 2, "G": 4, "D": 256, "STEP": 1, "SPLITS": 32, "BLOCK_G": 16, "BLOCK_N": 64, "BLOCK_D": 256}
        | {"UPCAST": False},
    ),
    "merge_parts_kernel": ("attention._prefill_kernel", 4, PARTS, {"D": 256, "SPLITS": 32, "BLOCK_D": 256}),
    "quantize_rows_kernel": ("linear.kernels", 8, FLOAT8, FLOAT8_ROW),
    "rms_norm_float8_kernel": (
        "linear.kernels", 8, FLOAT8 | {"eps": "fp32"}, FLOAT8_ROW | {"CENTERED": True, "RESIDUAL": True}
    ),
    "swiglu_float8_kernel": ("linear.kernels", 8, FLOAT8, FLOAT8_ROW),
    "copy_rows_kernel": (
        "_copy_rows", 8, dict.fromkeys(("p_target_rows", "p_source_rows", "p_parts"), "*i32"),
        {"HAS_TARGET": True, "HAS_SOURCE": True, "HAS_PARTS": True, "BLOCK": 8192},
    ),
    "pack_step_kernel": ("beams.kernels", 1, BEAM_TABLES, BEAM_ROWS | {"LEVELS": 4, "DEPTH": 2, "BLOCK_D": 2}),
    "pack_beams_kernel": ("beams.kernels", 1, BEAM_TABLES, BEAM_ROWS | {"LEVEL": 2, "BLOCK_F": 32}),
    "advance_beams_kernel": (
        "beams.kernels", 1, BEAM_TABLES, BEAM_ROWS | {"LEVEL": 2, "LEVELS": 4, "BLOCK_F": 32}
    ),
}  # fmt: skip


def kernel_names(source: str) -> list[str]:
    """Functions that a GPU starts: jitted, and named `..._kernel`."""
    return [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and node.decorator_list
    ]


def pointers(module: str, kernel: str) -> list[str]:
    path = ROOT / "onela" / "ops" / Path(*module.split(".")).with_suffix(".py")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == kernel:
            return [a.arg for a in node.args.args if a.arg.startswith("p_")]
    raise AssertionError(f"{path} has no {kernel}")


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_small_kernels(capability: int) -> None:
    # Ampere has no instruction for float8.
    kernels = {
        name: rest for name, rest in KERNELS.items() if capability > 80 or FLOAT8.items() - rest[2].items()
    }
    jobs: list[Job] = []
    for name, (module, warps, types, sizes) in kernels.items():
        given = dict.fromkeys(pointers(module, name), BF16) | types
        jobs.append((f"onela.ops.{module}", name, capability, warps, given, sizes))
    used = dict(zip(kernels, resources_of_all(jobs)))
    assert len(used) == len(kernels) > 10
    # Sine and cosine keep a table of angles beyond 1e5 on the stack.
    del used["rotary_angles_kernel"]
    assert {name: stack for name, (stack, _, _) in used.items() if stack} == {}


def test_every_kernel_is_compiled_by_some_test() -> None:
    texts = [path.read_text() for path in (ROOT / "tests" / "ops").rglob("test_compile*.py")]
    found = [name for path in (ROOT / "onela").rglob("*.py") for name in kernel_names(path.read_text())]
    assert len(found) > 15
    missing = [name for name in found if not any(name in text for text in texts)]
    assert missing == []
