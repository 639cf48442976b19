"""How good recommendations are: recall, NDCG and hit rate of SIDs and of items, legality, coverage, by beam width."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from onela.decoding import BeamParams
from onela.engine.engine import Engine
from onela.engine.examples import Example, ItemId, Sid
from onela.engine.request import Result
from onela.errors import ConfigError
from onela.items import ItemCatalog

T = TypeVar("T", Sid, ItemId)
CHUNK = 16


@dataclass(frozen=True)
class LevelMetrics:
    """Means over the examples, by `k`.

    Attributes:
        recall: share of the right answers among the first k.
        ndcg: the same with less for lower places: a right answer at place p (from 1) counts 1 / log2(p + 1), against
            the best order possible.
        hit_rate: share of examples with any right answer among the first k; with one right answer each, the recall.
        coverage: share of the catalogue that is among the first k of any example; None without a catalogue.
    """

    recall: dict[int, float]
    ndcg: dict[int, float]
    hit_rate: dict[int, float]
    coverage: dict[int, float] | None


@dataclass(frozen=True)
class EvaluationRun:
    """One beam width, with or without the constraint.

    Attributes:
        constrained: whether only SIDs of the catalogue were allowed. beam_width: beams per step.
        sid: metrics of ranked SIDs.
        item: metrics of ranked items, all items of a SID in their order; None where no example has a target item. It
            differs from `sid` when several items share a SID.
        legal_share: share of returned SIDs that the catalogue has; None without a catalogue.
        distinct_share: share of returned SIDs that are not a repetition within their answer.
        num_returned: SIDs per answer, on average. seconds: of the whole run.
    """

    constrained: bool
    beam_width: int
    sid: LevelMetrics
    item: LevelMetrics | None
    legal_share: float | None
    distinct_share: float
    num_returned: float
    seconds: float


@dataclass(frozen=True)
class Evaluation:
    """The whole report.

    Attributes:
        num_examples: examples. ks: lengths of the lists that were judged. runs: one per constraint and width.
        catalog_version: of the catalogue that was judged against.
    """

    num_examples: int
    ks: tuple[int, ...]
    runs: tuple[EvaluationRun, ...]
    catalog_version: str | None

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries and lists; the `k`s become strings, as JSON has it."""
        return {
            "num_examples": self.num_examples,
            "ks": list(self.ks),
            "catalog_version": self.catalog_version,
            "runs": [_with_text_keys(dataclasses.asdict(run)) for run in self.runs],
        }


def evaluate(
    engine: Engine,
    examples: Sequence[Example],
    *,
    beam_widths: Sequence[int] = (128,),
    ks: Sequence[int] = (5, 10),
    constraints: Sequence[bool] = (True,),
    normalizer: str = "level",
    progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """Answer all examples at every width, with and without the constraint, and judge the answers.

    Without the constraint an illegal SID keeps its place in the list, as a miss: that is what it costs.

    Args:
        engine: with a catalogue, unless `constraints` is `(False,)`.
        examples: from `ExampleReader`.
        beam_widths: widths to compare. ks: lengths of the lists to judge; an answer may be shorter than k.
        constraints: True: only SIDs of the catalogue; False: any combination of codes.
        normalizer: as in `BeamParams`.
        progress: called with the number of examples answered since the last call.
    Raises:
        ConfigError: an argument is unusable. RequestError, CapacityError: an example cannot be run.
    """
    widths, ks = _counts("beam_widths", beam_widths), _counts("ks", ks)
    if not examples:
        raise ConfigError("examples: at least one is needed")
    if not constraints:
        raise ConfigError("constraints: at least one of True and False is needed")
    if True in constraints and engine.catalog is None:
        raise ConfigError("constraints: the engine has no catalogue to constrain to")
    runs = []
    for constrained in constraints:
        # The weights are shared; what an engine owns beside them grows only with what it runs.
        runner = engine if constrained or engine.catalog is None else _without_catalog(engine)
        for width in widths:
            params = BeamParams.parse(
                {"beam_width": width, "num_return_sequences": min(width, max(ks)), "normalizer": normalizer}
            )
            start = time.perf_counter()
            results: list[Result] = []
            for first in range(0, len(examples), CHUNK):
                chunk = examples[first : first + CHUNK]
                results += runner.generate(
                    # Errors tell which example they are about.
                    [
                        dataclasses.replace(e.request, request_id=f"example {n}")
                        for n, e in enumerate(chunk, first + 1)
                    ],
                    params,
                )
                if progress is not None:
                    progress(len(chunk))
            seconds = time.perf_counter() - start
            runs.append(_judge(results, examples, engine, ks, constrained, width, seconds))
    version = None if engine.catalog is None else engine.catalog.version
    return Evaluation(len(examples), ks, tuple(runs), version)


def recall_at(ranked: Sequence[T | None], targets: frozenset[T], k: int) -> float:
    """Share of the targets among the first k. A repetition in the list counts once."""
    return len(targets.intersection(ranked[:k])) / len(targets)


def hit_at(ranked: Sequence[T | None], targets: frozenset[T], k: int) -> float:
    """1 when any target is among the first k, else 0."""
    return 0.0 if targets.isdisjoint(ranked[:k]) else 1.0


def ndcg_at(ranked: Sequence[T | None], targets: frozenset[T], k: int) -> float:
    """Discounted gain of the first k, over that of the best order. A repetition in the list gains nothing."""
    gain, left = 0.0, set(targets)
    for place, entry in enumerate(ranked[:k], 1):
        if entry in left:
            gain += 1 / math.log2(place + 1)
            left.discard(entry)
    best = sum(1 / math.log2(place + 1) for place in range(1, min(k, len(targets)) + 1))
    return gain / best


def _judge(
    results: Sequence[Result],
    examples: Sequence[Example],
    engine: Engine,
    ks: tuple[int, ...],
    constrained: bool,
    width: int,
    seconds: float,
) -> EvaluationRun:
    catalog = engine.catalog
    answers = [[item.sid for item in result.items] for result in results]
    returned = sum(map(len, answers))
    sids: list[list[Sid | None]] = [list(answer) for answer in answers]
    item, legal_share = None, None
    if catalog is not None:
        on_sid = _items_by_sid(engine, catalog, answers)
        sids = [[sid if sid in on_sid else None for sid in answer] for answer in answers]
        legal = sum(sid is not None for answer in sids for sid in answer)
        legal_share = legal / returned if returned else 1.0
        if any(example.target_items for example in examples):
            ranked: list[list[ItemId | None]] = [
                [entry for sid in answer for entry in on_sid.get(sid, (None,))] for answer in answers
            ]
            item = _level(ranked, [example.target_items for example in examples], ks, catalog.num_items)
    return EvaluationRun(
        constrained=constrained,
        beam_width=width,
        sid=_level(
            sids, [e.target_sids for e in examples], ks, None if catalog is None else catalog.num_sids
        ),
        item=item,
        legal_share=legal_share,
        distinct_share=sum(len(set(answer)) for answer in answers) / returned if returned else 1.0,
        num_returned=returned / len(results),
        seconds=seconds,
    )


def _level(
    ranked: Sequence[Sequence[T | None]],
    targets: Sequence[frozenset[T]],
    ks: tuple[int, ...],
    size: int | None,
) -> LevelMetrics:
    """Means over the examples with targets, coverage over all. None in a list is a place lost to an illegal SID."""
    judged = [(answer, wanted) for answer, wanted in zip(ranked, targets) if wanted]

    def mean(measure: Callable[[Sequence[T | None], frozenset[T], int], float], k: int) -> float:
        return sum(measure(answer, wanted, k) for answer, wanted in judged) / len(judged)

    coverage = None
    if size is not None:
        coverage = {}
        for k in ks:
            found = {entry for answer in ranked for entry in answer[:k]} - {None}
            coverage[k] = len(found) / size
    return LevelMetrics(
        recall={k: mean(recall_at, k) for k in ks},
        ndcg={k: mean(ndcg_at, k) for k in ks},
        hit_rate={k: mean(hit_at, k) for k in ks},
        coverage=coverage,
    )


def _items_by_sid(
    engine: Engine, catalog: ItemCatalog, answers: Sequence[Sequence[Sid]]
) -> dict[Sid, tuple[ItemId, ...]]:
    """The items of every SID in the answers that the catalogue has."""
    sids = sorted({sid for answer in answers for sid in answer})
    if not sids:
        return {}
    places = catalog.lookup(engine.vocabulary.encode(sids)).tolist()
    return {
        sid: tuple(catalog.item_id(item) for item in catalog.items_of(place))
        for sid, place in zip(sids, places)
        if place >= 0
    }


def _without_catalog(engine: Engine) -> Engine:
    return Engine(
        engine.model,
        engine.vocabulary,
        config=engine.config,
        tokenizer=engine.tokenizer,
        prompt_options=engine.prompt_encoder.options,
    )


def _counts(name: str, values: Sequence[int]) -> tuple[int, ...]:
    """Distinct positive whole numbers in ascending order."""
    if not values:
        raise ConfigError(f"{name}: at least one is needed")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}: whole numbers of at least 1 are expected, got {value!r}")
    return tuple(sorted(set(values)))


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _with_text_keys(entry) for key, entry in value.items()}
    return value
