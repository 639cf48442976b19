"""Catalogues switched while requests run: each answer is one version's, whole, and says which."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest

from onela import BeamParams, CatalogError, ItemCatalog, Request
from tests.engine.fake_model import LEGAL, VOCABULARY, answer, check_nothing_is_held, fake_engine
from tests.engine.helpers import catalog_of
from tests.engine.test_scheduler import prompt_of, run

OLD, NEW = catalog_of(LEGAL[:70], VOCABULARY), catalog_of(LEGAL[50:], VOCABULARY)
WIDE = BeamParams(beam_width=50)


def expected(catalog: ItemCatalog, request: Request) -> list[Any]:
    [result] = fake_engine(catalog).generate([request], WIDE)
    return answer(result)


def test_running_requests_end_on_the_version_they_began_with() -> None:
    engine = fake_engine(OLD)
    requests = [Request(prompt_token_ids=prompt_of(5 + i, i)) for i in range(4)]
    early = [engine.submit(request, WIDE) for request in requests[:2]]
    engine.step()
    engine.catalogs.load(NEW)
    engine.step()
    engine.catalogs.switch()
    late = [engine.submit(request, WIDE) for request in requests[2:]]
    run(engine)
    for request in early:
        assert request.outcome.catalog_version == OLD.version
        assert answer(request.outcome) == expected(OLD, request.request)
    for request in late:
        assert request.outcome.catalog_version == NEW.version
        assert answer(request.outcome) == expected(NEW, request.request)
    check_nothing_is_held(engine)


def test_filters_belong_to_the_version_too() -> None:
    engine = fake_engine(OLD)
    name = "-".join(map(str, LEGAL[60]))  # in both
    gone = "-".join(map(str, LEGAL[10]))  # in the old one alone
    before = engine.submit(Request(prompt_token_ids=[5], allow_item_ids=[name, gone]), WIDE)
    engine.step()
    engine.catalogs.load(NEW)
    engine.catalogs.switch()
    after = engine.submit(Request(prompt_token_ids=[5], allow_item_ids=[name, gone]), WIDE)
    run(engine)
    assert {item.item_id for item in before.outcome.items} == {name, gone}
    assert {item.item_id for item in after.outcome.items} == {name}
    check_nothing_is_held(engine)


def test_rollback_and_forward_again() -> None:
    engine = fake_engine(OLD)
    with pytest.raises(CatalogError, match="no earlier catalogue"):
        engine.catalogs.rollback()
    engine.catalogs.load(NEW)
    assert engine.catalogs.switch(NEW.version).version == NEW.version
    assert engine.catalogs.rollback().version == OLD.version
    assert engine.generate([Request(prompt_token_ids=[5])], WIDE)[0].catalog_version == OLD.version
    assert engine.catalogs.rollback().version == NEW.version


def test_a_wrong_version_or_none_switches_nothing() -> None:
    engine = fake_engine(OLD)
    with pytest.raises(CatalogError, match="no catalogue is loaded"):
        engine.catalogs.switch()
    engine.catalogs.load(NEW)
    with pytest.raises(CatalogError, match=f"version {NEW.version}, not xyz"):
        engine.catalogs.switch("xyz")
    assert engine.catalogs.active.version == OLD.version


@pytest.mark.parametrize(
    "lines",
    ['{"item_id": 1', '{"item_id": 1, "sid": [0, 1]}', '{"item_id": 1, "sid": [0, 1, 99]}', ""],
    ids=["truncated", "depth", "range", "empty"],
)
def test_a_broken_file_changes_nothing(tmp_path: Path, lines: str) -> None:
    engine = fake_engine(OLD)
    engine.catalogs.load(NEW)
    path = tmp_path / "items.jsonl"
    path.write_text(lines + "\n")
    with pytest.raises(CatalogError):
        engine.catalogs.load(path)
    assert engine.catalogs.active.version == OLD.version
    assert engine.catalogs.staged is not None
    assert engine.catalogs.staged.version == NEW.version


def test_a_file_is_loaded(tmp_path: Path) -> None:
    engine = fake_engine(OLD)
    path = tmp_path / "items.jsonl"
    rows = [{"item_id": i, "sid": list(sid), "metadata": {"k": i % 2}} for i, sid in enumerate(LEGAL)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    engine.catalogs.load(path)
    engine.catalogs.switch()
    [result] = engine.generate([Request(prompt_token_ids=[5], filter={"k": 1})], BeamParams(beam_width=120))
    assert sorted(item.item_id for item in result.items) == list(range(1, 120, 2))


def test_a_version_that_nobody_has_is_freed() -> None:
    engine = fake_engine(catalog_of(LEGAL[:30], VOCABULARY))
    first = weakref.ref(engine.served)
    for catalog in (NEW, OLD):
        engine.catalogs.load(catalog)
        engine.catalogs.switch()
    gc.collect()
    assert first() is None
