from __future__ import annotations

import pytest

from examples.movielens.data import MovieLens, find_movielens, load_movielens


@pytest.fixture(scope="session")
def movielens() -> MovieLens:
    """The real data, or a skip where the `recbole` wheel is not installed."""
    try:
        find_movielens()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return load_movielens()
