from __future__ import annotations

import pytest

from examples.movielens.data import MovieLens, load_movielens, split

ITEMS = """item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq
7\tHeat\t1995\tAction Crime
3\tAlien\t1979\tHorror
9\tUnknown\t\tDrama
"""
EVENTS = """user_id:token\titem_id:token\trating:float\ttimestamp:float
10\t9\t3\t20
2\t3\t5\t30
10\t7\t3\t10
2\t9\t1\t30
2\t7\t4\t5
10\t3\t3\t20
"""


@pytest.fixture
def tiny(tmp_path) -> MovieLens:
    (tmp_path / "ml-100k.item").write_text(ITEMS)
    (tmp_path / "ml-100k.inter").write_text(EVENTS)
    return load_movielens(tmp_path)


def test_events_are_ordered_by_time_then_by_file(tiny):
    assert tiny.item_ids == ["7", "3", "9"]
    assert tiny.titles == ["Heat (1995)", "Alien (1979)", "Unknown"]
    assert tiny.genres[0] == ["Action", "Crime"]
    assert tiny.years == [1995, 1979, 0]
    assert tiny.user_ids == ["2", "10"]
    assert tiny.events == [[0, 1, 2], [0, 2, 1]]


def test_split_hides_the_future(tiny):
    test, valid = split(tiny), split(tiny, "valid")
    assert test.histories == [[0, 1], [0, 2]]
    assert test.targets.tolist() == [2, 1]
    assert valid.histories == [[0], [0]]
    assert valid.targets.tolist() == [1, 2]
    with pytest.raises(ValueError, match="holdout"):
        split(tiny, "train")


def test_real_data_is_complete(movielens):
    assert movielens.num_items == 1682
    assert len(movielens.events) == 943
    assert sum(map(len, movielens.events)) == 100_000
    assert all(len(set(films)) == len(films) >= 20 for films in movielens.events)
