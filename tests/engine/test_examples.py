"""Reading held-out interactions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onela import ConfigError, ItemCatalog, Request, SidVocabulary
from onela.engine.examples import Example, ExampleReader
from tests.fixtures import make_tokenizer

ITEMS: dict[Any, list[int]] = {7: [0, 1], 8: [2, 0], "x": [2, 2], 9: [0, 1]}
SIDS = [f"<s_{level}_{code}>" for level in "ab" for code in range(3)]


def reader(*, begin: bool = True, catalog: bool = True, **options: Any) -> ExampleReader:
    special = ("<|sid_begin|>", "<|sid_end|>") if begin else ()
    vocabulary = SidVocabulary.from_tokenizer(make_tokenizer(SIDS, special))
    items = [{"item_id": str(item), "sid": sid} for item, sid in ITEMS.items()]
    return ExampleReader(
        vocabulary, ItemCatalog.from_items(items, vocabulary) if catalog else None, **options
    )


class TestHistory:
    def test_becomes_text(self) -> None:
        example = reader().parse({"history": ["7", "x"], "target": "8"})
        assert example.request.prompt == (
            "<|sid_begin|><s_a_0><s_b_1><|sid_end|><|sid_begin|><s_a_2><s_b_2><|sid_end|>"
        )
        assert example == Example(example.request, frozenset({(2, 0)}), frozenset({"8"}))

    def test_in_a_template(self) -> None:
        example = reader(begin=False, template="Seen: {history}. Next:").parse(
            {"history": ["8"], "target": "7"}
        )
        assert example.request == Request(prompt="Seen: <s_a_2><s_b_0>. Next:")

    def test_becomes_tokens(self) -> None:
        wanted = reader()
        example = reader(as_tokens=True).parse({"history": ["7", "x"], "target": "8"})
        begin, end = wanted.vocabulary.begin_token_id, wanted.vocabulary.end_token_id
        first, second = wanted.vocabulary.token_ids(0), wanted.vocabulary.token_ids(1)
        expected = [begin, first[0], second[1], end, begin, first[2], second[2], end, begin]
        assert example.request == Request(prompt_token_ids=[int(token) for token in expected])

    def test_the_latest_are_kept(self) -> None:
        short = reader(begin=False, max_history=2).parse({"history": ["7", "x", "8"], "target": "7"})
        assert short.request.prompt == "<s_a_2><s_b_2><s_a_2><s_b_0>"


class TestTargets:
    def test_several(self) -> None:
        example = reader().parse({"prompt": "p", "target": ["7", "9", "x"]})
        assert example.target_items == {"7", "9", "x"}
        assert example.target_sids == {(0, 1), (2, 2)}

    @pytest.mark.parametrize("value", [[2, 0], "<s_a_2><s_b_0>", "<|sid_begin|><s_a_2><s_b_0><|sid_end|>"])
    def test_a_sid(self, value: Any) -> None:
        for source in (reader(), reader(catalog=False)):
            example = source.parse({"prompt_token_ids": [1], "target_sid": value})
            assert (example.target_sids, example.target_items) == ({(2, 0)}, frozenset())

    def test_other_prompts(self) -> None:
        messages = [{"role": "user", "content": "hi"}]
        assert reader().parse({"messages": messages, "target": "7"}).request == Request(messages=messages)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"history": ["7"], "target": "8", "user": 3}, "user: unknown field"),
        ({"target": "8"}, "exactly one of history, prompt, prompt_token_ids, messages"),
        ({"history": ["7"], "prompt": "x", "target": "8"}, "exactly one of history"),
        ({"history": ["7"]}, "exactly one of target, target_sid"),
        ({"history": ["7"], "target": "8", "target_sid": [0, 1]}, "exactly one of target, target_sid"),
        ({"history": [], "target": "8"}, "history: a list of at least one item id"),
        ({"history": "7", "target": "8"}, "history: a list of at least one item id"),
        ({"history": ["7", "nine"], "target": "8"}, "history: item 'nine' is not in the catalogue"),
        ({"history": [7.5], "target": "8"}, "history: an item id is expected, got 7.5"),
        ({"history": ["7"], "target": "nine"}, "target: item 'nine' is not in the catalogue"),
        ({"history": ["7"], "target": []}, "target: an empty list"),
        ({"history": ["7"], "target": True}, "target: an item id is expected, got True"),
        ({"prompt": "x", "target_sid": [0]}, "target_sid: .*expected"),
        ({"prompt": "x", "target_sid": [0, 3]}, "target_sid: level 1: no SID token has code 3"),
        ({"prompt": "x", "target_sid": [1, 1]}, "target_sid: <s_a_1><s_b_1> is not in the catalogue"),
        ({"prompt": "x", "target_sid": "<s_a_1>"}, "target_sid: SID '<s_a_1>' has 1 levels"),
    ],
)
def test_malformed_rows(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        reader().parse(row)


def test_items_need_a_catalogue() -> None:
    with pytest.raises(ConfigError, match="history: item ids need a catalogue"):
        reader(catalog=False).parse({"history": ["7"], "target_sid": [0, 1]})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template": "no place"}, r"template: 'no place' has no \{history\}"),
        (
            {"template": "{history} ", "as_tokens": True},
            "template: text around the history needs a tokenizer",
        ),
        ({"max_history": 0}, "max_history: at least 1 is expected, got 0"),
    ],
)
def test_unusable_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        reader(**options)


class TestFile:
    def test_blank_lines_are_skipped(self, tmp_path: Path) -> None:
        file = tmp_path / "data.jsonl"
        rows = [{"history": ["7"], "target": "8"}, {"prompt": "a\u2028b", "target": "x"}]
        file.write_text(
            "\n" + "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", "utf-8"
        )
        assert [example.target_items for example in reader().read(file)] == [{"8"}, {"x"}]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ('{"history": ["7"], "target": "8"}\n{', "line 2: not JSON"),
            ('{"history": ["7"], "target": "8"}\n\n[1]', "line 3: an object is expected, found list"),
            ('{"history": ["7"], "target": "no"}', "line 1: target: item 'no' is not in the catalogue"),
            ('{"prompt": 3, "prompt_token_ids": [1], "target": "8"}', "line 1: exactly one of history"),
            ("\n", "no example"),
        ],
    )
    def test_errors_name_the_line(self, tmp_path: Path, text: str, message: str) -> None:
        file = tmp_path / "data.jsonl"
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"{file}.*{message}"):
            reader().read(file)

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="not readable"):
            reader().read(tmp_path / "none.jsonl")
