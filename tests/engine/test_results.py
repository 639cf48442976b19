"""Answers of many items are built without a pause for the garbage collector, and written as plain dictionaries."""

from __future__ import annotations

import contextlib
import gc
import json
from typing import Any

import numpy as np
import pytest

from onela import RecommendedItem, Request, RequestError, Result
from onela.engine.request import Usage
from onela.engine.results import without_collection


@pytest.mark.parametrize("before", [True, False])
def test_the_collector_is_left_as_it_was(before: bool) -> None:
    was = gc.isenabled()
    try:
        gc.enable() if before else gc.disable()
        with without_collection():
            assert not gc.isenabled()
        assert gc.isenabled() == before
        with contextlib.suppress(KeyError), without_collection():
            raise KeyError
        assert gc.isenabled() == before
    finally:
        gc.enable() if was else gc.disable()


def test_a_result_becomes_plain_dictionaries() -> None:
    item = RecommendedItem((1, 2), (17,), ("Heat",), -0.5, -0.25, (5, 9), (-0.25, -0.25))
    result = Result((item,), "stop", Usage(3, 2, (4, 8), 8), request_id="mine")
    read = json.loads(json.dumps(result.to_dict()))
    assert list(read) == [
        "items",
        "finish_reason",
        "usage",
        "request_id",
        "catalog_version",
        "timings",
        "reason",
    ]
    assert read["items"] == [
        {
            "sid": [1, 2],
            "item_ids": [17],
            "titles": ["Heat"],
            "cum_logprob": -0.5,
            "sequence_score": -0.25,
            "token_ids": [5, 9],
            "token_logprobs": [-0.25, -0.25],
        }
    ]
    assert read["usage"]["beam_widths"] == [4, 8]
    assert read["request_id"] == "mine"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", 5),
        ("session_id", b"user"),
        ("logprobs", "no"),
        ("logprobs", 3),
        ("priority", True),
        ("priority", np.True_),
        ("priority", 1.0),
        ("timeout_s", True),
        ("timeout_s", np.float32("nan")),
        ("prompt_token_ids", {1, 17}),
        ("prompt_token_ids", {1: 2}),
        ("prompt_token_ids", b"\x01\x11"),
        ("prompt_token_ids", "12"),
    ],
)
def test_a_field_of_another_kind_is_refused_by_its_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{field}: "):
        Request(**{"prompt_token_ids": [1, 17], field: value})


def test_numbers_of_numpy_are_kept_as_pythons() -> None:
    request = Request(prompt_token_ids=[1], priority=np.int8(3), timeout_s=np.float32(2.5))  # type: ignore[arg-type]
    assert (type(request.priority), request.priority) == (int, 3)
    assert (type(request.timeout_s), request.timeout_s) == (float, 2.5)
