"""Semantic IDs: residual k-means over film embeddings made from the training events (and the films' genres and years).

Everything runs in float64 from seeded generators, so that the same events give the same codes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from .baselines import transitions
from .data import MovieLens


@dataclass(frozen=True)
class SidOptions:
    """How films become codes.

    Attributes:
        codebook_sizes: codes per level.
        dim: size of the film embedding made from who is watched near whom.
        feature_weight: weight of genre and year beside that embedding.
        popularity_power: a film counts `audience ** popularity_power` in k-means.
        iterations: k-means iterations per level.
        seed: of the k-means start.
    """

    codebook_sizes: tuple[int, ...] = (64, 64, 32)
    dim: int = 64
    feature_weight: float = 0.3
    popularity_power: float = 0.5
    iterations: int = 50
    seed: int = 0


def item_embeddings(data: MovieLens, histories: list[list[int]], options: SidOptions) -> torch.Tensor:
    """Films watched close together lie close together.

    A truncated eigendecomposition of the positive pointwise mutual information of films at most 50 places apart in a
    history, beside genres and release year.

    Returns:
        [num_items, dim + features] fp64; each part's rows have the length 1 and `feature_weight`.
    """
    near = transitions(histories, data.num_items, window=50, decay=0.95).double()
    near = near + near.T
    total = near.sum(1)
    # The added constant draws the information of rarely seen pairs towards none.
    expected = total[:, None] * total[None, :] / total.sum()
    information = ((near + 1) / (expected + 1)).log().clamp(min=0)
    values, vectors = torch.linalg.eigh(information)
    sessions = vectors[:, -options.dim :] * values[-options.dim :].clamp(min=0).sqrt()

    names = sorted({genre for genres in data.genres for genre in genres})
    features = torch.zeros(data.num_items, len(names) + 1, dtype=torch.float64)
    for row, genres, year in zip(features, data.genres, data.years):
        row[[names.index(genre) for genre in genres]] = 1
        row[-1] = (year - 1980) / 20 if year else 0
    parts = [sessions, options.feature_weight * torch.nn.functional.normalize(features, dim=1)]
    return torch.cat([torch.nn.functional.normalize(parts[0], dim=1), parts[1]], dim=1)


def build_semantic_ids(
    data: MovieLens, histories: list[list[int]], options: SidOptions | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Gives each film its own tuple of codes.

    The levels before the last are plain residual k-means. At the last level the films of one prefix take different
    codes: the most watched film first, each the nearest free one.

    Returns:
        codes: [num_items, num_levels] int64, no two rows equal.
        centroids: one [codebook size, dim] fp64 per level.
    Raises:
        ValueError: a prefix has more films than the last level has codes.
    """
    options = options or SidOptions()
    generator = torch.Generator().manual_seed(options.seed)
    audience = torch.bincount(
        torch.tensor([film for films in histories for film in films]), minlength=data.num_items
    )
    weights = (audience.double() + 1) ** options.popularity_power
    residual = item_embeddings(data, histories, options)
    codes: list[torch.Tensor] = []
    centroids: list[torch.Tensor] = []
    for level, size in enumerate(options.codebook_sizes):
        centroids.append(kmeans(residual, weights, size, options.iterations, generator))
        distances = torch.cdist(residual, centroids[-1])
        last = level == len(options.codebook_sizes) - 1
        assigned = _distinct(distances, codes, audience) if last else distances.argmin(1)
        codes.append(assigned)
        residual = residual - centroids[-1][assigned]
    return torch.stack(codes, dim=1), centroids


def kmeans(
    points: torch.Tensor,
    weights: torch.Tensor,
    num_clusters: int,
    iterations: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """Weighted k-means with a k-means++ start.

    Args:
        points: [N, D] fp64.
        weights: [N] fp64, positive.
    Returns:
        [num_clusters, D] fp64 centroids.
    """
    first = torch.multinomial(weights, 1, generator=generator)
    chosen = [first]
    nearest = (points - points[first]).square().sum(1)
    for _ in range(num_clusters - 1):
        chosen.append(torch.multinomial(weights * nearest + 1e-12, 1, generator=generator))
        nearest = torch.minimum(nearest, (points - points[chosen[-1]]).square().sum(1))
    centroids = points[torch.cat(chosen)].clone()
    for _ in range(iterations):
        member = torch.zeros(len(points), num_clusters, dtype=points.dtype)
        member[torch.arange(len(points)), torch.cdist(points, centroids).argmin(1)] = weights
        mass = member.sum(0)
        # A cluster that lost all its points stays where it is.
        moved = (member.T @ points) / mass.clamp(min=1e-12)[:, None]
        centroids = torch.where(mass[:, None] > 0, moved, centroids)
    return centroids


def save_codes(path: Path, item_ids: list[str], codes: torch.Tensor) -> None:
    """Writes `{item_id: [code, ...]}`, one film a line."""
    lines = [f"{json.dumps(item)}: {json.dumps(row)}" for item, row in zip(item_ids, codes.tolist())]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def load_codes(path: Path, item_ids: list[str]) -> torch.Tensor:
    """Reads what `save_codes` wrote, in the order of `item_ids`."""
    table = json.loads(path.read_text(encoding="utf-8"))
    return torch.tensor([table[item] for item in item_ids])


def _distinct(distances: torch.Tensor, prefix: list[torch.Tensor], audience: torch.Tensor) -> torch.Tensor:
    """Codes of the last level: nearest first, but never twice below the same prefix."""
    preference = distances.argsort(dim=1).tolist()
    prefixes = list(zip(*(level.tolist() for level in prefix))) or [()] * len(preference)
    taken: dict[tuple[int, ...], set[int]] = {}
    codes = torch.zeros(len(preference), dtype=torch.int64)
    for film in audience.argsort(descending=True, stable=True).tolist():
        used = taken.setdefault(prefixes[film], set())
        free = next((code for code in preference[film] if code not in used), None)
        if free is None:
            raise ValueError(
                f"prefix {prefixes[film]} has more films than the last level has codes ({distances.shape[1]})"
            )
        used.add(free)
        codes[film] = free
    return codes
