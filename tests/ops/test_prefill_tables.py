"""The tables of a prefill forward: every token and chunk of every prompt once, padding nowhere."""

from __future__ import annotations

import numpy as np
import pytest

from onela.ops.prefill_tables import BEHIND, CHUNK, NewTokens, PrefillShape, TableLayout

PAGE = 16


def prompt(new: int, cached: int, place: int, pages: list[int]) -> NewTokens:
    return NewTokens(np.arange(100 * place, 100 * place + new, dtype=np.int32), cached, place, pages)


@pytest.mark.parametrize("padding", [0, 1, 77])
@pytest.mark.parametrize("spare", [0, 2])
def test_prompts_stand_side_by_side_and_padding_behind_them(padding: int, spare: int) -> None:
    prompts = [
        prompt(70, 0, 3, list(range(20, 25))),
        prompt(9, 32, 1, [7, 8, 9]),
        prompt(64, 0, 0, [1, 2, 5, 4]),
    ]
    shape = PrefillShape(143 + padding, 3 + spare, 70, goes_on=True)
    layout = TableLayout(shape, PAGE)
    flat = layout.host(prompts)
    tables = layout.tables(flat)
    ends = [70, 79, 143, *[143] * spare, 143 + padding]
    assert tables.cu_seqlens.tolist() == [0, *ends]
    assert tables.prompts.tolist() == [3, 1, 0, *[-1] * (spare + 1)]
    assert tables.cached_lens.tolist() == [0, 32, 0, *[0] * (spare + 1)]
    assert layout.part(flat, "last_rows").tolist() == [69, 78, 142, *[0] * spare]
    assert layout.part(flat, "token_ids").tolist()[70:79] == list(range(100, 109))
    assert layout.part(flat, "positions").tolist()[70:79] == list(range(32, 41))
    rows = tables.page_rows.tolist()
    assert rows[:2] == [20 * PAGE, 20 * PAGE + 1]
    assert rows[70:79] == [9 * PAGE + i for i in range(9)]
    assert rows[143:] == [-1] * padding
    # Chunks: those of all tokens, in order, and the rest behind every end.
    counts = [2, 1, 1, *[0] * spare, -(-padding // CHUNK)]
    wanted = [[n, t] for n, count in enumerate(counts) for t in range(count)]
    assert tables.chunks.tolist()[: len(wanted)] == wanted
    assert all(row == [3 + spare, BEHIND] for row in tables.chunks.tolist()[len(wanted) :])
    assert tables.chunk_starts.tolist() == [0, *np.cumsum(counts).tolist()]


def test_a_buffer_of_nothing_is_all_padding() -> None:
    layout = TableLayout(PrefillShape(128, 4, 128, goes_on=True), PAGE)
    tables = layout.tables(layout.host([]))
    assert tables.cu_seqlens.tolist() == [0, 0, 0, 0, 0, 128]
    assert set(tables.prompts.tolist()) == {-1}
    assert set(tables.page_rows.tolist()) == {-1}


def test_the_largest_batches_of_a_shape_fit_into_its_tables() -> None:
    """As many chunks as there can be: every prompt one token past a border."""
    prompts = [prompt(CHUNK + 1, 16, i, list(range(10 * i, 10 * i + 6))) for i in range(4)]
    total = 4 * (CHUNK + 1)
    layout = TableLayout(PrefillShape(total + 1, 4, CHUNK + 1, goes_on=True), PAGE)
    tables = layout.tables(layout.host(prompts))
    assert int(tables.chunk_starts[-1]) == 9 <= len(tables.chunks)


def test_in_a_rectangle_every_prompt_begins_at_its_own_row() -> None:
    prompts = [prompt(70, 0, 3, list(range(20, 25))), prompt(9, 0, 1, [7, 8, 9])]
    layout = TableLayout(PrefillShape(3 * 96, 3, 96, rectangle=True), PAGE)
    flat = layout.host(prompts)
    tables = layout.tables(flat)
    assert tables.rectangle
    assert tables.cu_seqlens.tolist() == [0, 70, 96, 105, 192, 192, 288]
    assert tables.prompts.tolist() == [3, -1, 1, -1, -1, -1]
    assert layout.part(flat, "last_rows").tolist() == [69, 104, 0]
    assert layout.part(flat, "token_ids").tolist()[96:105] == list(range(100, 109))
    assert tables.page_rows.tolist()[96:106] == [7 * PAGE + i for i in range(9)] + [-1]
    counts = [2, 1, 1, 2, 0, 2]
    assert tables.chunk_starts.tolist() == [0, *np.cumsum(counts).tolist()]
    assert len(tables.chunks) >= sum(counts)
