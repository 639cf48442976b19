"""The selection kernels compile without a GPU, with few spills."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from tests.ops.compile_only import resources

FLOATS = ("p_logits", "p_cum", "p_lognorm", "p_out_scores")
INTS = (
    "p_nodes", "p_count", "p_group_keys", "p_chunk_keys", "p_done", "p_cu_rows", "p_cu_out", "p_keys", "p_selected",
    "p_kept_keys", "p_kept_items", "p_out", "p_out_codes",
)  # fmt: skip
TYPES = dict.fromkeys(FLOATS, "*fp32") | dict.fromkeys(INTS, "*i32")
TYPES |= {"p_first": "*i64", "p_out_nodes": "*i64"}


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "norm"), [(80, None), (90, None), (100, None), (90, 0), (90, 1)])
def test_rows_kernel(capability: int, norm: int | None) -> None:
    """`norm` None: all codes, over the level; else a trie with that normalizer."""
    constants = {
        "BLOCK_C": 8192,
        "BLOCK_P": 512,
        "F1": 32,
        "F2": 16,
        "F3": 16,
        "BLOCK_DONE": 16,
        "NORM": norm or 0,
        "CONSTRAINED": norm is not None,
        "p_given": None,
    }
    if norm is None:
        constants |= {"p_offsets": None, "p_codes": None, "p_first": None, "p_count": None}
    types = TYPES | {"p_offsets": "*i32", "p_codes": "*i32"}
    module = "onela.ops.beam_select.kernels"
    used = resources(module, "beam_select_rows_kernel", capability, 8, types, constants)
    assert used[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("level", "F", "stack"), [(1, 32, 0), (3, 16, 256)])
@pytest.mark.parametrize("capability", [80, 90])
def test_level_kernel(capability: int, level: int, F: int, stack: int) -> None:
    constants = {
        "F": F,
        "F12": 512,
        "LEVEL": level,
        "CONSTRAINED": False,
        "CAP": 8192,
        "SUB": 8192,
        "BLOCK_B": 4,
    }
    constants["p_codes"] = None
    module = "onela.ops.beam_select._level_kernel"
    used = resources(module, "beam_select_level_kernel", capability, 16, TYPES, constants)
    assert used[0] <= stack
