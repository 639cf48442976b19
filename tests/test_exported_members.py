"""The public surface: complete, sorted, and every error derived from one."""

from __future__ import annotations

import inspect

import onela
from onela import errors


def test_all_is_complete_and_sorted() -> None:
    public = [
        name
        for name in vars(onela)
        if not name.startswith("_") and not inspect.ismodule(getattr(onela, name))
    ]
    assert sorted([*public, "__version__"]) == sorted(onela.__all__)
    assert onela.__all__ == sorted(onela.__all__, key=lambda name: (name.startswith("__"), name.lower()))
    assert all(hasattr(onela, name) for name in onela.__all__)


def test_every_error_derives_from_one() -> None:
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__]
    assert len(classes) > 8
    for error in classes:
        assert issubclass(error, onela.OneLAError)
        assert getattr(onela, error.__name__) is error
        assert error.__name__ in (errors.__doc__ or "")
