"""MovieLens-100K as sequences of films, and the leave-one-out split by time.

The ratings come out of the installed `recbole` wheel, which carries them as an example data set. The package is only
located, never imported, and nothing of the data is written into this repository.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class MovieLens:
    """Films and who watched them when.

    Attributes:
        item_ids: [num_items] the data set's film ids; every other field speaks of positions in this list.
        titles: [num_items] film titles with their year.
        genres: [num_items] genre names of each film.
        years: [num_items] release years, 0 where unknown.
        user_ids: [num_users] the data set's user ids.
        events: [num_users] each user's films, oldest first; equal timestamps keep the file's order.
    """

    item_ids: list[str]
    titles: list[str]
    genres: list[list[str]]
    years: list[int]
    user_ids: list[str]
    events: list[list[int]]

    @property
    def num_items(self) -> int:
        return len(self.item_ids)


@dataclass(frozen=True)
class Split:
    """What a recommender may see of each user, and the film it should name next.

    Attributes:
        num_items: number of films.
        histories: [num_users] films before the held-out one, oldest first. Also the films excluded from the ranking.
        targets: [num_users] int64; the held-out film.
    """

    num_items: int
    histories: list[list[int]]
    targets: torch.Tensor


def find_movielens() -> Path:
    """Returns the directory of MovieLens-100K inside the `recbole` wheel.

    Raises:
        FileNotFoundError: the wheel is not installed; the message says how to install it.
    """
    spec = importlib.util.find_spec("recbole")
    for location in spec.submodule_search_locations or [] if spec else []:
        path = Path(location) / "dataset_example" / "ml-100k"
        if (path / "ml-100k.inter").is_file():
            return path
    raise FileNotFoundError("MovieLens-100K not found: pip install --no-deps recbole==1.2.1")


def load_movielens(path: Path | None = None) -> MovieLens:
    """Reads `ml-100k.item` and `ml-100k.inter`.

    Args:
        path: directory that holds both files; found inside the `recbole` wheel if not given.
    """
    path = path or find_movielens()
    item_ids, titles, genres, years = [], [], [], []
    for item_id, title, year, classes in _rows(path / "ml-100k.item"):
        item_ids.append(item_id)
        titles.append(f"{title} ({year})" if year.isdigit() else title)
        genres.append(classes.split())
        years.append(int(year) if year.isdigit() else 0)
    index = {item_id: i for i, item_id in enumerate(item_ids)}

    timed: dict[str, list[tuple[float, int, int]]] = {}
    for line, (user, item, _rating, timestamp) in enumerate(_rows(path / "ml-100k.inter")):
        timed.setdefault(user, []).append((float(timestamp), line, index[item]))
    user_ids = sorted(timed, key=int)
    events = [[item for _, _, item in sorted(timed[user])] for user in user_ids]
    return MovieLens(item_ids, titles, genres, years, user_ids, events)


def split(data: MovieLens, holdout: str = "test") -> Split:
    """Holds out one film per user.

    Args:
        holdout: `"test"` holds out the last film; `"valid"` the one before it, and hides the last.
    """
    if holdout not in ("test", "valid"):
        raise ValueError(f"holdout: must be 'test' or 'valid', got {holdout!r}")
    back = 1 if holdout == "test" else 2
    histories = [films[:-back] for films in data.events]
    targets = torch.tensor([films[-back] for films in data.events])
    return Split(data.num_items, histories, targets)


def _rows(path: Path) -> list[list[str]]:
    """The tab-separated rows of a RecBole file, without its header."""
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    return [line.split("\t") for line in lines]
