"""The selection kernels compile without a GPU, with few spills."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from tests.ops.compile_only import resources

FLOATS = ("p_logits", "p_cum", "p_lognorm", "p_out_scores")
INTS = (
    "p_nodes", "p_offsets", "p_codes", "p_allowed", "p_allowed_rows", "p_count", "p_counts", "p_group_keys", "p_groups",
    "p_bins", "p_bound", "p_found", "p_done", "p_cu_rows", "p_cu_out", "p_kept_keys", "p_kept_items",
    "p_candidate_keys", "p_candidate_rows", "p_candidate_places", "p_out", "p_out_rows", "p_out_codes",
)  # fmt: skip
TYPES = dict.fromkeys(FLOATS, "*fp32") | dict.fromkeys(INTS, "*i32")
TYPES |= {"p_first": "*i64", "p_out_nodes": "*i64", "p_finite": "*i1"}
NO_TRIE = dict.fromkeys(("p_codes", "p_allowed", "p_allowed_rows"))
CANDIDATES = "onela.ops.beam_select._candidate_kernels"


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "norm"), [(80, None), (90, None), (100, None), (90, 0), (90, 1)])
def test_rows_kernel(capability: int, norm: int | None) -> None:
    """`norm` None: all codes, over the level; else a trie with masks and that normalizer."""
    constants = {"BLOCK_C": 8192, "BLOCK_P": 512, "GROUP": 256, "CHUNK": 16, "BLOCK_DONE": 16, "BLOCK_B": 4}
    trie = norm is not None
    constants |= {"NORM": norm or 0, "CONSTRAINED": trie, "MASKED": trie, "CHECKED": True, "p_given": None}
    if not trie:
        constants |= NO_TRIE | {"p_offsets": None}
    used = resources(CANDIDATES, "beam_select_rows_kernel", capability, 8, TYPES, constants)
    assert used[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("trie", [False, True])
@pytest.mark.parametrize(("emit", "groups"), [(False, 1), (True, 8)])
def test_candidates_kernel(emit: bool, groups: int, trie: bool) -> None:
    constants = {"BLOCK_C": 8192, "GROUP": 256, "GROUPS": groups, "PARTS": 4, "BLOCK_B": 4, "EMIT": emit}
    constants |= {"CONSTRAINED": trie, "MASKED": trie} | ({} if trie else NO_TRIE)
    used = resources(CANDIDATES, "beam_select_candidates_kernel", 90, groups, TYPES, constants)
    assert used[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "constants"),
    [
        ("beam_select_bound_kernel", {}),
        ("beam_select_offsets_kernel", {"PARTS": 4, "SPARE": 8, "MORE": 1024, "BLOCK": 4096}),
        (
            "beam_select_best_kernel",
            {"SPARE": 8, "MORE": 1024, "CAP": 16384, "SUB": 2048, "CONSTRAINED": True},
        ),
    ],
)
def test_kernels_of_a_request(name: str, constants: dict) -> None:
    used = resources(CANDIDATES, name, 90, 16, TYPES, constants)
    assert used[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("last", "stack"), [(False, 0), (True, 256)])
@pytest.mark.parametrize("capability", [80, 90])
def test_level_kernel(capability: int, last: bool, stack: int) -> None:
    constants = {"GROUP": 256, "F1": 32, "LAST": last, "CONSTRAINED": last, "MASKED": last}
    constants |= {"CAP": 8192, "SUB": 4096, "BLOCK_B": 4} | ({} if last else NO_TRIE)
    module = "onela.ops.beam_select._level_kernel"
    used = resources(module, "beam_select_level_kernel", capability, 16, TYPES, constants)
    assert used[0] <= stack
