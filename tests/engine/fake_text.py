"""An engine over the model of integers that has a catalogue with titles, and takes text."""

from __future__ import annotations

from typing import Any

from onela import Engine, EngineConfig, ItemCatalog
from tests.engine.fake_model import LEGAL, VOCABULARY, FakeModel

ITEMS = [
    {
        "item_id": i,
        "sid": list(sid),
        "title": f"Item {i}",
        "metadata": {"lang": ["en", "de", "fr"][i % 3], "in_stock": i % 2 == 0},
    }
    for i, sid in enumerate(sorted(LEGAL))
]
CATALOG = ItemCatalog.from_items(ITEMS, VOCABULARY)


class FakeTokenizer:
    """One token per letter."""

    chat_template = "{{ messages }}"

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [3 + ord(letter) % 90 for letter in text]}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages)


def text_engine(catalog: ItemCatalog | None = CATALOG, **options: Any) -> Engine:
    model: Any = FakeModel()
    config = EngineConfig(device="cpu", **options)
    return Engine(model, VOCABULARY, catalog, config=config, tokenizer=FakeTokenizer())
