"""The whole road, once per published convention: directory on disk and a prompt in words, to items."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from onela import BeamParams, Engine, ItemCatalog, Request, Result
from tests import fixtures
from tests.fixtures import CONVENTIONS, Published
from tests.models.parity import reference_scores

CHAT = ["openonerec", "onerec_think", "qwen3_5_hybrid"]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Published]:
    root = tmp_path_factory.mktemp("published")
    return {name: save(root / name) for name, save in CONVENTIONS.items()}


def past_items(checkpoint: Published) -> str:
    """Two items as the prompts of these models write them."""
    return ", ".join(checkpoint.text(sid) for sid in list(checkpoint.items.values())[:2])


def ask(engine: Engine, **prompt: Any) -> Result:
    (result,) = engine.generate([Request(**prompt)], BeamParams(beam_width=100, normalizer="vocabulary"))
    return result


def check(result: Result, checkpoint: Published, prompt: list[int]) -> None:
    """The beam is wider than the catalogue: all SIDs come back, with transformers' scores, in their order."""
    on_sid: dict[tuple[int, ...], list[int | str]] = defaultdict(list)
    for item, sid in checkpoint.items.items():
        on_sid[sid].append(item)
    tokens = [checkpoint.tokenizer(checkpoint.text(sid))["input_ids"] for sid in on_sid]
    scores = reference_scores(checkpoint.reference, prompt, tokens).tolist()
    expected = dict(zip(on_sid, zip(tokens, scores)))
    assert result.usage.prompt_tokens == len(prompt)
    assert len(result.items) == len(on_sid)
    assert result.finish_reason == "exhausted"
    given = [item.cum_logprob for item in result.items]
    assert given == sorted(given, reverse=True)
    for item in result.items:
        wanted_tokens, score = expected[item.sid]
        assert list(item.token_ids) == wanted_tokens
        assert item.cum_logprob == pytest.approx(score, abs=2e-4)
        assert sorted(item.item_ids, key=str) == sorted(on_sid[item.sid], key=str)


@pytest.mark.parametrize("name", CHAT)
def test_messages_to_items(published: dict[str, Published], name: str) -> None:
    checkpoint = published[name]
    engine = Engine.from_pretrained(checkpoint.path, catalog=checkpoint.catalog, device="cpu")
    messages = [
        {"role": "system", "content": "You recommend videos."},
        {"role": "user", "content": f"I watched {past_items(checkpoint)} — what next?"},
    ]
    prompt = checkpoint.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, enable_thinking=False, return_dict=False
    )
    words = checkpoint.tokenizer.decode(prompt)
    assert words.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    begin = checkpoint.tokenizer.convert_tokens_to_ids("<|sid_begin|>")
    check(ask(engine, messages=messages), checkpoint, [*prompt, begin])


@pytest.mark.parametrize("name", CHAT)
def test_text_to_items(published: dict[str, Published], name: str) -> None:
    checkpoint = published[name]
    engine = Engine.from_pretrained(checkpoint.path, catalog=checkpoint.catalog, device="cpu")
    text = f"Watched: {past_items(checkpoint)}. Next: "
    prompt = checkpoint.tokenizer(text + "<|sid_begin|>")["input_ids"]
    without, with_prefix = ask(engine, prompt=text), ask(engine, prompt=text + "<|sid_begin|>")
    check(without, checkpoint, prompt)
    assert with_prefix.items == without.items


def test_minionerec_text_to_items(published: dict[str, Published]) -> None:
    checkpoint = published["minionerec"]
    engine = Engine.from_pretrained(checkpoint.path, catalog=checkpoint.catalog, device="cpu")
    text = f"### User Input:\n{past_items(checkpoint)}\n\n### Response:\n"
    prompt = checkpoint.tokenizer(text)["input_ids"]
    # A SID is one token per level, whatever their order in the vocabulary.
    assert sum(token >= 261 for token in prompt) == 6
    check(ask(engine, prompt=text), checkpoint, prompt)


def test_minionerec_catalog_brings_titles(published: dict[str, Published]) -> None:
    checkpoint = published["minionerec"]
    engine = Engine.from_pretrained(checkpoint.path, device="cpu")
    catalog = ItemCatalog.load(checkpoint.catalog, engine.vocabulary, info=checkpoint.path / "info.txt")
    engine = Engine.from_pretrained(checkpoint.path, catalog=catalog, device="cpu")
    for item in ask(engine, prompt="Next:\n").items:
        assert item.titles == tuple(f"Item number {item_id}" for item_id in item.item_ids)


def test_minionerec_writes_nothing_after_the_sid(published: dict[str, Published]) -> None:
    checkpoint = published["minionerec"]
    engine = Engine.from_pretrained(checkpoint.path, catalog=checkpoint.catalog, device="cpu")
    result = ask(engine, prompt="Next:\n")
    assert result.usage.completion_tokens == 3
    newline, end = checkpoint.tokenizer("\n")["input_ids"][0], checkpoint.tokenizer.eos_token_id
    assert not {newline, end} & {token for item in result.items for token in item.token_ids}


def test_items_on_one_sid_stand_by_their_count(published: dict[str, Published]) -> None:
    checkpoint = published["openonerec"]
    engine = Engine.from_pretrained(checkpoint.path, catalog=checkpoint.catalog, device="cpu")
    found = {item.sid: item.item_ids for item in ask(engine, prompt="x").items}
    first = next(iter(checkpoint.items.values()))
    # Item n has the count n % 7 + 1: 7 for item 1000, 5 for item 1040.
    assert found[first] == (1000, 1040)


def test_a_vocabulary_of_the_published_size(tmp_path: Path) -> None:
    checkpoint = fixtures.save_openonerec(tmp_path, codebook_size=8192)
    engine = Engine.from_pretrained(checkpoint.path, catalog=checkpoint.catalog, device="cpu")
    assert engine.vocabulary.codebook_sizes == (8192, 8192, 8192)
    assert engine.model.config.vocab_size % 256 == 0
    assert engine.model.config.vocab_size > len(checkpoint.tokenizer) == 256 + 5 + 3 * 8192 + 2
    prompt = checkpoint.tokenizer("x<|sid_begin|>")["input_ids"]
    check(ask(engine, prompt="x"), checkpoint, prompt)
