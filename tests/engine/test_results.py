"""Answers of many items are built without a pause for the garbage collector."""

from __future__ import annotations

import contextlib
import gc

import pytest

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
