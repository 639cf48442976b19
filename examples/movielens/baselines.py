"""Rankers without a neural network.

Each returns `[num_users, k]` film indices, best first, without the films already seen.
"""

from __future__ import annotations

import torch

from .data import Split

TOP = 10


def popularity(split: Split, k: int = TOP) -> torch.Tensor:
    """The films that most users have watched."""
    counts = _watched(split).sum(0)
    return top_unseen(counts.expand(len(split.histories), -1), split, k)


def item_knn(split: Split, last: int | None = None, k: int = TOP) -> torch.Tensor:
    """Films whose audience is like (cosine) that of the user's films.

    Args:
        last: use only the user's last films, or all of them.
    """
    watched = _watched(split)
    together = watched.T @ watched
    audience = together.diagonal().clamp(min=1).sqrt()
    similarity = together / (audience[:, None] * audience[None, :])
    similarity.fill_diagonal_(0)
    return top_unseen(_watched(split, last) @ similarity, split, k)


def markov(split: Split, k: int = TOP) -> torch.Tensor:
    """Second-order Markov chain: films that follow the last two films directly or with one film between."""
    follows = transitions(split.histories, split.num_items, window=2, decay=1.0)
    follows = follows / follows.sum(1, keepdim=True).clamp(min=1)
    counts = _watched(split).sum(0)
    # So small that popularity only orders films that no transition reaches.
    prior = 1e-3 * counts / counts.sum()
    return top_unseen(recency(split.histories, split.num_items, 0.5, 2) @ follows + prior, split, k)


def cooccurrence(split: Split, k: int = TOP) -> torch.Tensor:
    """Films watched near the user's recent ones, in either order (see `neighbour_scores`)."""
    weights = recency(split.histories, split.num_items, NEIGHBOUR_RECENCY, 60)
    return top_unseen(weights @ neighbour_scores(split.histories, split.num_items), split, k)


# Chosen on the validation events.
NEIGHBOUR_RECENCY = 0.8


def neighbour_scores(histories: list[list[int]], num_items: int) -> torch.Tensor:
    """How much a film just watched speaks for each other film.

    MovieLens users rate lists of films in bursts, so what lies within a session counts and its order hardly does:
    films at a distance of up to 50 count as neighbours, near ones more, in both directions; a popular film counts less.

    Returns:
        [num_items, num_items] fp32, rows: the film watched.
    """
    near = transitions(histories, num_items, window=50, decay=0.95)
    near = near + near.T
    audience = torch.bincount(
        torch.tensor([film for films in histories for film in films]), minlength=num_items
    )
    return near / (near.sum(1, keepdim=True) + 5) / (audience + 5).sqrt()


def transitions(histories: list[list[int]], num_items: int, window: int, decay: float) -> torch.Tensor:
    """Counts film `j` at most `window` films after film `i`; a distance of `d` counts `decay ** (d - 1)`.

    Returns:
        [num_items, num_items] fp32.
    """
    counts = torch.zeros(num_items * num_items)
    sequences = [torch.tensor(films) for films in histories]
    for distance in range(1, window + 1):
        pairs = torch.cat([films[:-distance] * num_items + films[distance:] for films in sequences])
        counts += torch.bincount(pairs, minlength=num_items * num_items) * decay ** (distance - 1)
    return counts.view(num_items, num_items)


def recency(histories: list[list[int]], num_items: int, decay: float, last: int) -> torch.Tensor:
    """Weights of each user's `last` films: 1 for the latest, `decay` for the one before, and so on.

    Returns:
        [num_users, num_items] fp32.
    """
    weights = torch.zeros(len(histories), num_items)
    for row, films in zip(weights, histories):
        recent = torch.tensor(films[-last:][::-1], dtype=torch.int64)
        row[recent] = decay ** torch.arange(len(recent), dtype=torch.float32)
    return weights


def top_unseen(scores: torch.Tensor, split: Split, k: int) -> torch.Tensor:
    """The `k` best films of each user by `scores` `[num_users, num_items]`, without those in the user's history."""
    return scores.masked_fill(_watched(split).bool(), -torch.inf).topk(k).indices


def _watched(split: Split, last: int | None = None) -> torch.Tensor:
    """[num_users, num_items] fp32; 1 where the user's history (or its last films) has the film."""
    return recency(split.histories, split.num_items, 1.0, last or max(map(len, split.histories)))
