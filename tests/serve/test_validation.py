"""Of a field that may have several forms, what is told is wrong with the one that was meant."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from onela.serve import protocol
from onela.serve.validation import MAX_ERRORS, MAX_FAULTS, faults_of

PROMPT_KINDS = "Input should be a valid string or a valid list"
VALUES = "Input should be a valid boolean, a valid integer, a valid number"


def told(form: type[protocol.Body], body: Any) -> list[str]:
    """What is wrong with a body, a line per fault."""
    with pytest.raises(ValidationError) as caught:
        form.model_validate(body)
    # FastAPI puts the kind of parameter in front.
    errors = [{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()]
    return [f"{fault.field}: {fault.text}{fault.given}" for fault in faults_of(errors, body)]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (5, f"prompt: {PROMPT_KINDS} (got 5)"),
        ({"a": 1}, f"prompt: {PROMPT_KINDS} (got an object)"),
        ("", "prompt: String should have at least 1 character (got '')"),
        ([], "prompt: List should have at least 1 item after validation, not 0"),
        ([5, -1], "prompt.1: Input should be greater than or equal to 0 (got -1)"),
        ([5, 2**31], "prompt.1: Input should be less than 2147483648 (got 2147483648)"),
        ([5] * 100 + ["a"], "prompt.100: Input should be a valid integer (got 'a')"),
        ([5, [6]], "prompt.1: Input should be a valid integer (got a list)"),
        ([True], "prompt.0: Input should be a valid integer (got True)"),
        ([[5], [-1]], "prompt.1.0: Input should be greater than or equal to 0 (got -1)"),
        ([[5], ["x"]], "prompt.1.0: Input should be a valid integer (got 'x')"),
        ([[]], "prompt.0: List should have at least 1 item after validation, not 0"),
        (["a", ""], "prompt.1: String should have at least 1 character (got '')"),
        (["a", 5], f"prompt.1: {PROMPT_KINDS} (got 5)"),
        (["a"] * 65, "prompt: List should have at most 64 items after validation, not 65"),
    ],
)
def test_a_prompt_of_completions(prompt: Any, message: str) -> None:
    assert told(protocol.CompletionRequest, {"model": "onela", "prompt": prompt}) == [message]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"exclude_item_ids": [1, None]},
            "exclude_item_ids.1: Input should be a valid integer or a valid string (got None)",
        ),
        ({"exclude_item_ids": "abc"}, "exclude_item_ids: Input should be a valid list (got 'abc')"),
        ({"filter": {"lang": None}}, f"filter.lang: {VALUES}, a valid string or a valid list (got None)"),
        ({"filter": {"lang": ["en", None]}}, f"filter.lang.1: {VALUES} or a valid string (got None)"),
        ({"filter": {"lang": [["en"]]}}, f"filter.lang.0: {VALUES} or a valid string (got a list)"),
        ({"filter": {"lang": float("inf")}}, "filter.lang: Input should be a finite number (got inf)"),
        ({"filter": ["lang"]}, "filter: Input should be a valid dictionary (got a list)"),
        (
            {"beam_width_array": [5, 0]},
            "beam_width_array.1: Input should be greater than or equal to 1 (got 0)",
        ),
        ({"messages": [{"role": "user"}]}, "messages.0.content: Field required"),
        ({"colour": 1}, "colour: Extra inputs are not permitted"),
    ],
)
def test_a_field_of_recommend(change: dict[str, Any], message: str) -> None:
    assert told(protocol.RecommendRequest, {"prompt": "x", **change}) == [message]


def test_every_field_that_is_wrong_is_told_once() -> None:
    body = {"model": "onela", "prompt": [5, "a", 6, "b"], "exclude_item_ids": [None, 1.5], "n": 0}
    assert [line.split(":")[0] for line in told(protocol.CompletionRequest, body)] == [
        "n",
        "exclude_item_ids.0",
        "prompt.1",
    ]


def test_of_a_list_the_first_wrong_entry_is_told() -> None:
    """Whatever form comes first, the one that was meant is found, however long the list."""
    tokens = told(protocol.CompletionRequest, {"model": "onela", "prompt": [5] + [-1] * 3000, "n": 0})
    assert [line.split(":")[0] for line in tokens] == ["n", "prompt.1"]
    many = told(protocol.CompletionRequest, {"model": "onela", "prompt": ["a"] * 3000})
    assert many == ["prompt: List should have at most 64 items after validation, not 3000"]
    ids = told(protocol.RecommendRequest, {"prompt": "x", "exclude_item_ids": [None] * 3000})
    text = "Input should be a valid integer or a valid string (got None)"
    assert ids == [f"exclude_item_ids.0: {text}"]
    words = told(protocol.RecommendRequest, {"prompt": "x", "filter": {"lang": ["en"] + [None] * 3000}})
    assert [line.split(":")[0] for line in words] == ["filter.lang.1"]


def test_few_errors_are_looked_at() -> None:
    """Every field that nobody knows is an error of its own."""
    body = {"prompt": "x", **{f"field_{i}": i for i in range(2 * MAX_ERRORS)}}
    with pytest.raises(ValidationError) as caught:
        protocol.RecommendRequest.model_validate(body)
    seen = [{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()]
    rest = [None] * MAX_ERRORS  # whoever looks at these fails
    assert len(faults_of([*seen[:MAX_ERRORS], *rest], body)) == MAX_FAULTS


def test_what_is_no_body() -> None:
    assert told(protocol.RecommendRequest, [1]) == [
        "body: Input should be a valid dictionary or instance of RecommendRequest"
    ]
