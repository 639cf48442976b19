"""OneLA: exact wide-beam decoding for generative recommenders.

Example:

    import onela

    engine = onela.Engine.from_pretrained("my-model", catalog="items.jsonl")
    params = onela.BeamParams(beam_width=256, num_return_sequences=10)
    [result] = engine.generate([onela.Request(prompt="...")], params)
    for item in result.items:
        print(item.item_id, item.title, item.cum_logprob)
"""

from onela._version import __version__
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
