"""Filters at decode time: exact, on any level, and honest about what they leave."""

from __future__ import annotations

from typing import Any

import pytest

from onela import BeamParams, ItemCatalog, Request, RequestError
from tests.engine.fake_model import LEGAL, VOCABULARY, answer, check_nothing_is_held, fake_engine
from tests.engine.test_scheduler import prompt_of

ITEMS = [
    {"item_id": i, "sid": list(sid), "metadata": {"lang": ["en", "de", "fr"][i % 3], "in_stock": i % 2 == 0}}
    for i, sid in enumerate(sorted(LEGAL))
]
ITEMS += [{**item, "item_id": 1000 + item["item_id"]} for item in ITEMS[:40]]
CATALOG = ItemCatalog.from_items(ITEMS, VOCABULARY)
ALL = BeamParams(beam_width=120)


def eligible_catalog(request: dict[str, Any]) -> ItemCatalog | None:
    """The catalogue with nothing else in it: what a filter means."""
    kept = [
        item
        for item in ITEMS
        if item["item_id"] not in request.get("exclude_item_ids", ())
        and ("allow_item_ids" not in request or item["item_id"] in request["allow_item_ids"])
        and all(
            item["metadata"][name] in (value if isinstance(value, list) else [value])
            for name, value in request.get("filter", {}).items()
        )
    ]
    return ItemCatalog.from_items(kept, VOCABULARY) if kept else None


FILTERS: list[dict[str, Any]] = [
    {"exclude_item_ids": list(range(0, 160, 3))},
    {"exclude_item_ids": [0, 1, 2, 1000, 1001]},
    {"allow_item_ids": [3, 7, 1007, 90, 5555]},
    {"filter": {"lang": ["en"], "in_stock": True}},
    {"filter": {"lang": ["de", "fr"]}, "exclude_item_ids": list(range(30, 110))},
    {"filter": {"in_stock": False}, "allow_item_ids": list(range(20)), "exclude_item_ids": [1, 3]},
]


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("width", [3, 120])
@pytest.mark.parametrize("normalizer", ["level", "allowed", "vocabulary"])
def test_a_filter_is_as_if_nothing_else_were_in_the_catalogue(
    filters: dict[str, Any], width: int, normalizer: Any
) -> None:
    params = BeamParams(beam_width=width, normalizer=normalizer)
    prompt = prompt_of(9)
    [result] = fake_engine(CATALOG).generate([Request(prompt_token_ids=prompt, **filters)], params)
    [expected] = fake_engine(eligible_catalog(filters)).generate([Request(prompt_token_ids=prompt)], params)
    assert answer(result) == answer(expected)
    assert result.usage.beam_widths == expected.usage.beam_widths


def test_filtered_and_unfiltered_requests_share_a_batch() -> None:
    engine = fake_engine(CATALOG)
    requests = [
        Request(prompt_token_ids=prompt_of(4 + i, i), **filters)
        for i, filters in enumerate([{}, *FILTERS, {}])
    ]
    for request, result in zip(requests, engine.generate(requests, BeamParams(beam_width=10))):
        [expected] = fake_engine(CATALOG).generate([request], BeamParams(beam_width=10))
        assert answer(result) == answer(expected)
    check_nothing_is_held(engine)


@pytest.mark.parametrize(
    "filters",
    [
        {"allow_item_ids": []},
        {"allow_item_ids": [77777]},
        {"filter": {"lang": "it"}},
        {"filter": {"lang": "en"}, "exclude_item_ids": [item["item_id"] for item in ITEMS]},
    ],
)
def test_a_filter_that_leaves_nothing_gives_an_empty_list_and_says_why(filters: dict[str, Any]) -> None:
    engine = fake_engine(CATALOG)
    [result, other] = engine.generate(
        [Request(prompt_token_ids=[5], **filters), Request(prompt_token_ids=[5])], BeamParams(beam_width=4)
    )
    assert result.items == ()
    assert result.finish_reason == "filtered"
    assert "no item of the catalogue is left" in str(result.reason)
    assert len(other.items) == 4
    check_nothing_is_held(engine)


def test_fewer_than_asked_for_says_so() -> None:
    [result] = fake_engine(CATALOG).generate([Request(prompt_token_ids=[5], allow_item_ids=[3, 50])], ALL)
    assert len(result.items) == 2
    assert result.finish_reason == "exhausted"
    assert result.reason == "120 were asked for; of legal ones the beams have 2"


def test_prefixes_obey_filters_too() -> None:
    filters = {"allow_item_ids": [3, 50, 90]}
    params = BeamParams(beam_width=20, max_tokens=2)
    [result] = fake_engine(CATALOG).generate([Request(prompt_token_ids=[5], **filters)], params)
    assert {item.sid for item in result.items} == {tuple(ITEMS[i]["sid"][:2]) for i in (3, 50, 90)}


def test_filters_need_a_catalogue() -> None:
    with pytest.raises(RequestError, match="allow_item_ids: needs a catalogue"):
        fake_engine(None).generate([Request(prompt_token_ids=[5], allow_item_ids=[1])])


def test_masks_that_move_are_where_every_selection_of_the_step_looks() -> None:
    """Rows for the masks of those who normalise otherwise, and are chosen apart, may be too many for the first room."""
    engine = fake_engine(CATALOG)
    find = engine.runner._selections
    where: list[list[Any]] = []

    def watched(requests: Any) -> Any:
        selections, masks = find(requests), engine.served.masks
        assert masks is not None
        where.append([shape.masks == (masks.rows.data_ptr(), len(masks.rows)) for shape, _ in selections])
        return selections

    engine.runner._selections = watched  # type: ignore[method-assign]
    for i in range(8):
        params = BeamParams(beam_width=8, normalizer="level" if i < 4 else "allowed")
        engine.submit(Request(prompt_token_ids=prompt_of(4 + i, i), exclude_item_ids=[50 + i]), params)
    while engine.scheduler.has_work:
        engine.step()
    assert where == [[True, True]] * len(where)
    check_nothing_is_held(engine)
