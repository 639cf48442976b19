"""OneLA: exact wide-beam decoding for generative recommenders.

Example:

    import onela

    engine = onela.Engine.from_pretrained("my-model", catalog="items.jsonl")
    params = onela.BeamParams(beam_width=256, num_return_sequences=10)
    [result] = engine.generate([onela.Request(prompt="...")], params)
    for item in result.items:
        print(item.item_id, item.title, item.cum_logprob)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from onela._version import __version__

if TYPE_CHECKING:
    from onela.config import EngineConfig
    from onela.decoding import BeamParams
    from onela.engine import Engine, RecommendedItem, Request, Result, Usage
    from onela.errors import (
        CancelledError,
        CapacityError,
        CatalogError,
        CheckpointError,
        ConfigError,
        DeadlineError,
        DtypeError,
        EngineError,
        NumericsError,
        OneLAError,
        QueueFullError,
        RequestError,
        ShapeError,
        UnavailableError,
        VocabularyError,
    )
    from onela.items import ItemCatalog, ItemTrie, SidVocabulary

# Where each name lies. It is looked up when it is first used: torch takes seconds to import, and `onela --help` needs
# none of it.
_PLACES = {
    "config": ("EngineConfig",),
    "decoding": ("BeamParams",),
    "engine": ("Engine", "RecommendedItem", "Request", "Result", "Usage"),
    "items": ("ItemCatalog", "ItemTrie", "SidVocabulary"),
}

__all__ = [
    "BeamParams",
    "CancelledError",
    "CapacityError",
    "CatalogError",
    "CheckpointError",
    "ConfigError",
    "DeadlineError",
    "DtypeError",
    "Engine",
    "EngineConfig",
    "EngineError",
    "ItemCatalog",
    "ItemTrie",
    "NumericsError",
    "OneLAError",
    "QueueFullError",
    "RecommendedItem",
    "Request",
    "RequestError",
    "Result",
    "ShapeError",
    "SidVocabulary",
    "UnavailableError",
    "Usage",
    "VocabularyError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'onela' has no attribute {name!r}")
    module = next((module for module, names in _PLACES.items() if name in names), "errors")
    value = getattr(importlib.import_module(f"onela.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
