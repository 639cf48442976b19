"""The public surface: complete, sorted, and every error derived from one."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys

import pytest

import onela
from onela import errors


def test_all_is_complete_and_sorted() -> None:
    assert onela.__all__ == sorted(onela.__all__, key=lambda name: (name.startswith("__"), name.lower()))
    assert set(onela.__all__) <= set(dir(onela))
    for name in onela.__all__:
        value = getattr(onela, name)
        assert name.startswith("__") or value.__name__ == name
    # What is there for type checkers is what is there.
    tree = ast.parse(inspect.getsource(onela))
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    imported = [alias.name for node in checked.body for alias in node.names]  # type: ignore[attr-defined]
    assert sorted([*imported, "__version__"]) == sorted(onela.__all__)


def test_what_is_not_there_is_an_error() -> None:
    with pytest.raises(AttributeError, match="module 'onela' has no attribute 'Beam'"):
        onela.Beam  # noqa: B018


def test_torch_is_imported_when_it_is_needed() -> None:
    code = (
        "import sys, onela, onela.cli.main; assert 'torch' not in sys.modules; "
        "onela.OneLAError; assert 'torch' not in sys.modules; onela.Engine; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_error_derives_from_one() -> None:
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__]
    assert len(classes) > 8
    for error in classes:
        assert issubclass(error, onela.OneLAError)
        assert getattr(onela, error.__name__) is error
        assert error.__name__ in (errors.__doc__ or "")
