"""The judge: metrics against their definitions, and whole reports against the engine's own answers."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from onela import BeamParams, ConfigError, Engine, Request, RequestError, Result
from onela.engine.evaluate import CHUNK, evaluate, hit_at, ndcg_at, recall_at
from onela.engine.examples import Example, ExampleReader
from tests.fixtures import Published, save_hybrid


class TestMetrics:
    RANKED = ("a", None, "b", "c", "b")

    @pytest.mark.parametrize(
        ("targets", "k", "recall", "hit", "gain"),
        [
            ({"a"}, 1, 1.0, 1.0, 1.0),
            ({"b"}, 2, 0.0, 0.0, 0.0),
            ({"b"}, 3, 1.0, 1.0, 1 / math.log2(4)),
            ({"b"}, 100, 1.0, 1.0, 1 / math.log2(4)),
            ({"z"}, 5, 0.0, 0.0, 0.0),
            ({"a", "c"}, 3, 0.5, 1.0, 1 / (1 + 1 / math.log2(3))),
            ({"a", "c"}, 4, 1.0, 1.0, (1 + 1 / math.log2(5)) / (1 + 1 / math.log2(3))),
            ({"a", "c"}, 1, 0.5, 1.0, 1.0),
        ],
    )
    def test_definitions(self, targets: set[str], k: int, recall: float, hit: float, gain: float) -> None:
        wanted = frozenset(targets)
        assert recall_at(self.RANKED, wanted, k) == recall
        assert hit_at(self.RANKED, wanted, k) == hit
        assert ndcg_at(self.RANKED, wanted, k) == pytest.approx(gain, abs=1e-12)

    def test_a_repetition_gains_nothing(self) -> None:
        assert ndcg_at(("a", "a"), frozenset({"a"}), 2) == 1.0
        assert recall_at(("a", "a"), frozenset({"a", "b"}), 2) == 0.5

    def test_an_empty_answer(self) -> None:
        assert (recall_at((), frozenset({"a"}), 5), ndcg_at((), frozenset({"a"}), 5)) == (0.0, 0.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Published:
    # 4 codes per level and 51 items: about half of all 64 SIDs are legal, and many items share one.
    return save_hybrid(tmp_path_factory.mktemp("hybrid"), codebook_size=4)


@pytest.fixture(scope="module")
def engine(checkpoint: Published) -> Engine:
    return Engine.from_pretrained(checkpoint.path, catalog=checkpoint.catalog, device="cpu")


@pytest.fixture(scope="module")
def examples(checkpoint: Published, engine: Engine) -> list[Example]:
    reader = ExampleReader(engine.vocabulary, engine.catalog)
    ids = list(checkpoint.items)
    return [reader.parse({"history": ids[i : i + 3], "target": ids[i + 3]}) for i in range(20)]


def by_hand(
    answers: list[Result], checkpoint: Published, examples: list[Example], k: int, level: str
) -> dict[str, float]:
    """The same numbers from the engine's answers, one after the other."""
    hits, gains, found = [], [], set()
    for example, result in zip(examples, answers, strict=True):
        ranked: list[Any] = []
        for item in result.items:
            on_sid = [key for key, sid in checkpoint.items.items() if sid == item.sid]
            if level == "sid":
                ranked.append(item.sid if on_sid else None)
            else:
                ranked += sorted(on_sid) or [None]
        (target,) = example.target_sids if level == "sid" else example.target_items
        place = ranked[:k].index(target) if target in ranked[:k] else None
        hits.append(place is not None)
        gains.append(0.0 if place is None else 1 / math.log2(place + 2))
        found |= set(ranked[:k]) - {None}
    size = len(set(checkpoint.items.values())) if level == "sid" else len(checkpoint.items)
    count = len(examples)
    return {"recall": sum(hits) / count, "ndcg": sum(gains) / count, "coverage": len(found) / size}


@pytest.mark.parametrize("constrained", [True, False])
def test_a_report_agrees_with_the_answers(
    checkpoint: Published, engine: Engine, examples: list[Example], constrained: bool
) -> None:
    report = evaluate(engine, examples, beam_widths=[20, 6], ks=[5, 10, 1], constraints=[constrained])
    assert (report.num_examples, report.ks) == (20, (1, 5, 10))
    assert [run.beam_width for run in report.runs] == [6, 20]
    judged = engine if constrained else Engine.from_pretrained(checkpoint.path, device="cpu")
    for run in report.runs:
        assert run.constrained == constrained
        params = BeamParams(beam_width=run.beam_width, num_return_sequences=min(run.beam_width, 10))
        answers = judged.generate([example.request for example in examples], params)
        for k in (1, 5, 10):
            for level, metrics in (("sid", run.sid), ("item", run.item)):
                assert metrics is not None
                assert metrics.coverage is not None
                expected = by_hand(answers, checkpoint, examples, k, level)
                assert metrics.recall[k] == metrics.hit_rate[k] == pytest.approx(expected["recall"])
                assert metrics.ndcg[k] == pytest.approx(expected["ndcg"])
                assert metrics.coverage[k] == pytest.approx(expected["coverage"])
    # The judge has something to tell apart: SIDs from items, and hits from misses.
    assert 0 < report.runs[1].sid.recall[10] < 1
    assert report.runs[1].item is not None
    assert report.runs[1].item.recall[10] < report.runs[1].sid.recall[10]


def test_the_constraint_keeps_answers_legal(engine: Engine, examples: list[Example]) -> None:
    report = evaluate(engine, examples, beam_widths=[12], constraints=[True, False])
    free, bound = sorted(report.runs, key=lambda run: run.constrained)
    assert bound.legal_share == 1.0
    assert free.legal_share is not None
    assert 0.2 < free.legal_share < 0.9
    assert free.distinct_share == bound.distinct_share == 1.0
    assert free.num_returned == bound.num_returned == 10


def test_answers_shorter_than_k(engine: Engine, examples: list[Example]) -> None:
    (run,) = evaluate(engine, examples[:3], beam_widths=[2], ks=[10]).runs
    assert run.num_returned == 2


def test_without_a_catalogue(checkpoint: Published, engine: Engine) -> None:
    bare = Engine.from_pretrained(checkpoint.path, device="cpu")
    example = Example(Request(prompt="x"), frozenset({(0, 0, 0)}))
    (run,) = evaluate(bare, [example], beam_widths=[64], ks=[64], constraints=[False]).runs
    assert (run.item, run.legal_share, run.sid.coverage) == (None, None, None)
    assert run.sid.recall[64] == 1.0
    with pytest.raises(ConfigError, match="constraints: the engine has no catalogue"):
        evaluate(bare, [example])


def test_items_are_judged_where_items_are_given(engine: Engine, examples: list[Example]) -> None:
    only_sid = Example(examples[0].request, examples[0].target_sids)
    (run,) = evaluate(engine, [only_sid], ks=[10]).runs
    assert run.item is None
    (alone,) = evaluate(engine, [examples[1]], ks=[10]).runs
    (mixed,) = evaluate(engine, [only_sid, examples[1]], ks=[10]).runs
    assert alone.item is not None
    assert mixed.item is not None
    assert mixed.item.recall == alone.item.recall


def test_progress_and_json(engine: Engine, examples: list[Example]) -> None:
    seen: list[int] = []
    report = evaluate(engine, examples, beam_widths=[4], constraints=[True, False], progress=seen.append)
    assert sum(seen) == 40
    written = json.loads(json.dumps(report.to_json()))
    assert written["num_examples"] == 20
    assert written["catalog_version"] == engine.catalog.version  # type: ignore[union-attr]
    assert written["runs"][0]["sid"]["recall"]["5"] == report.runs[0].sid.recall[5]
    assert [run["constrained"] for run in written["runs"]] == [True, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_widths": []}, "beam_widths: at least one is needed"),
        ({"beam_widths": [0]}, "beam_widths: whole numbers of at least 1 are expected, got 0"),
        ({"ks": [5, 2.5]}, "ks: whole numbers of at least 1 are expected, got 2.5"),
        ({"constraints": []}, "constraints: at least one of True and False"),
    ],
)
def test_unusable_arguments(
    engine: Engine, examples: list[Example], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluate(engine, examples, **options)


@pytest.mark.parametrize("place", [0, 5, CHUNK])
def test_a_wrong_example_is_named(engine: Engine, examples: list[Example], place: int) -> None:
    """By its number among all, which one that is run alone keeps."""
    wrong = Example(Request(prompt_token_ids=[-1]), frozenset({(0, 0, 0)}))
    with pytest.raises(RequestError, match=f"^example {place + 1}: prompt_token_ids: the token in place 0"):
        evaluate(engine, [*examples[:place], wrong])


def test_no_examples(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="examples: at least one is needed"):
        evaluate(engine, [])
