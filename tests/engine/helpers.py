"""Engines over tiny models, and the witnesses their answers are held against."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from onela import BeamParams, Engine, ItemCatalog, Request, SidVocabulary
from tests.checkpoints import save_qwen3_5

Sid = tuple[int, ...]


def vocabulary_of(*sizes: int, first: int = 10) -> SidVocabulary:
    """Levels of the given sizes, with shuffled tokens and a gap between levels."""
    generator = torch.Generator().manual_seed(7)
    levels, start = [], first
    for size in sizes:
        levels.append((torch.randperm(size, generator=generator) + start).tolist())
        start += size + 1
    return SidVocabulary.from_token_ids(levels)


def catalog_of(sids: Iterable[Sid], vocabulary: SidVocabulary) -> ItemCatalog:
    """One item per SID, named after it."""
    items = [{"item_id": "-".join(map(str, sid)), "sid": list(sid), "title": f"Item {sid}"} for sid in sids]
    return ItemCatalog.from_items(items, vocabulary)


def random_sids(count: int, sizes: Sequence[int], seed: int = 0) -> list[Sid]:
    """Distinct random SIDs."""
    generator = torch.Generator().manual_seed(seed)
    everything = list(itertools.product(*map(range, sizes)))
    return [everything[i] for i in torch.randperm(len(everything), generator=generator)[:count].tolist()]


def random_prompt(length: int, seed: int = 0, vocab_size: int = 97) -> list[int]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(0, vocab_size, (length,), generator=generator).tolist()


class Scorer:
    """Scores every legal SID with transformers' model: the exhaustive witness of a beam search."""

    def __init__(
        self, model: Any, vocabulary: SidVocabulary, legal: Sequence[Sid], normalizer: str = "level"
    ) -> None:
        self.model, self.vocabulary, self.legal, self.normalizer = (
            model,
            vocabulary,
            sorted(legal),
            normalizer,
        )

    @torch.no_grad()
    def scores(self, prompt: Sequence[int]) -> dict[Sid, list[float]]:
        """Cumulative log-probability after each level of every legal SID."""
        tokens = self.vocabulary.decode_tokens(self.vocabulary.encode(torch.tensor(self.legal).numpy()))
        rows = torch.tensor([[*prompt, *row] for row in tokens.tolist()])
        logits = torch.cat(
            [self.model(chunk).logits[:, len(prompt) - 1 : -1].double() for chunk in rows.split(128)]
        )
        result: dict[Sid, list[float]] = {}
        for i, sid in enumerate(self.legal):
            total, steps = 0.0, []
            for level, code in enumerate(sid):
                row = logits[i, level]
                own = torch.from_numpy(self.vocabulary.token_ids(level))
                if self.normalizer == "level":
                    norm = row[own].logsumexp(-1)
                elif self.normalizer == "vocabulary":
                    norm = row.logsumexp(-1)
                else:
                    allowed = sorted({s[level] for s in self.legal if s[:level] == sid[:level]})
                    norm = row[own[allowed]].logsumexp(-1)
                total += float(row[own[code]] - norm)
                steps.append(total)
            result[sid] = steps
        return result

    def beam_search(self, prompt: Sequence[int], widths: Sequence[int]) -> list[tuple[Sid, float]]:
        """Beam search over the exhaustive scores, by definition: keep the best prefixes of each level."""
        scores = self.scores(prompt)
        beams: set[Sid] = {()}
        for level, width in enumerate(widths):
            prefixes = {
                sid[: level + 1]: steps[level] for sid, steps in scores.items() if sid[:level] in beams
            }
            best = sorted(prefixes.items(), key=lambda pair: (-pair[1], pair[0]))[:width]
            beams = {prefix for prefix, _ in best}
        return best


def check_equal(items: Sequence[Any], expected: Sequence[tuple[Sid, float]], tolerance: float = 1e-4) -> None:
    """The same SIDs with the same scores; neighbours whose scores are closer than the tolerance may swap."""
    assert {item.sid for item in items} == {sid for sid, _ in expected}
    scores = dict(expected)
    for item in items:
        assert abs(item.cum_logprob - scores[item.sid]) < tolerance
    for item, (_, score) in zip(items, expected):
        assert abs(item.cum_logprob - score) < tolerance


def tiny_engine(path: Path, vocabulary: SidVocabulary, catalog: ItemCatalog | None, **options: Any) -> Engine:
    return Engine.from_pretrained(path, vocabulary=vocabulary, catalog=catalog, device="cpu", **options)


__all__ = [
    "BeamParams",
    "Request",
    "Scorer",
    "catalog_of",
    "check_equal",
    "random_prompt",
    "random_sids",
    "save_qwen3_5",
    "tiny_engine",
    "vocabulary_of",
]
