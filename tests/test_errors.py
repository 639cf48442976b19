"""Errors say what is wrong in few words, and survive the way between processes."""

from __future__ import annotations

import inspect
import pickle

import pytest

from onela import errors
from onela.errors import CatalogError, OneLAError, QueueFullError, RequestError

CLASSES = [cls for cls in vars(errors).values() if inspect.isclass(cls) and issubclass(cls, OneLAError)]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_can_be_pickled(cls: type[OneLAError]) -> None:
    error: OneLAError
    if cls is RequestError:
        error = RequestError("n", "at most 5", value=iter([6]))  # whatever the value is
    elif cls is QueueFullError:
        error = QueueFullError("full", retry_after_s=2.5)
    elif cls is CatalogError:
        error = CatalogError("not JSON", path="items.jsonl", line=3)
    else:
        error = cls("what happened")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is cls
    assert (str(back), vars(back)) == (str(error), vars(error))


def test_none_is_a_value_too() -> None:
    assert str(RequestError("length_penalty", "a number is expected", value=None)) == (
        "length_penalty: a number is expected (got None)"
    )
    assert str(RequestError("prompt", "give one")) == "prompt: give one"


def test_a_message_quotes_no_megabytes() -> None:
    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    for value in ("x" * 10**6, 10**5000, [1] * 10**6, Odd()):
        error = RequestError("filter." + "y" * 10**6, "no item has this attribute", value=value)
        assert len(str(error)) < 700
        assert "no item has this attribute (got " in str(error)
        assert len(str(error.about("prompt"))) < 400
    assert str(error) == error.args[0]
    assert str(RequestError("n", "at most 5", value=10**5000)).endswith(
        "(got something of type int that cannot be written out)"
    )
