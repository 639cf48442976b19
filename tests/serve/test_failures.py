"""Every error of OneLA's has a status, and the documents have every status."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from onela import errors
from onela.serve.failures import STATUS, classify, error_response

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "errors.md"
CLASSES = [
    cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.OneLAError)
]


def test_every_status_and_code_is_documented() -> None:
    text = DOCUMENT.read_text()
    rows = re.findall(r"^\| (\d{3}) \| `(\w+)`", text, re.M)
    for _, status, _, code in STATUS:
        assert (str(status), code) in rows
    for cls in CLASSES:
        assert f"`{cls.__name__}`" in text or cls is errors.OneLAError


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_every_error_has_an_answer(cls: type[errors.OneLAError]) -> None:
    if cls is errors.RequestError:
        error: errors.OneLAError = errors.RequestError("n", "too many", value=3)
    elif cls is errors.QueueFullError:
        error = errors.QueueFullError("full", retry_after_s=2.2)
    else:
        error = cls("what happened")
    response = error_response(error)
    assert response.status_code == classify(error)[0]
    assert b"what happened" in response.body or cls in (errors.RequestError, errors.QueueFullError)
    if cls is errors.QueueFullError:
        assert response.headers["retry-after"] == "3"


def test_an_error_may_quote_what_utf8_cannot_write() -> None:
    response = error_response(errors.RequestError("filter.\ud800", "no item has it", value="é"))
    assert json.loads(response.body)["error"]["param"] == "filter.\\ud800"
    assert "'é'" in json.loads(response.body)["error"]["message"]
