"""Semantic IDs and the items behind them: vocabulary, catalogue, trie."""

from onela.items.builder import CatalogItem
from onela.items.catalog import ItemCatalog
from onela.items.convert import convert_catalog
from onela.items.device_masks import MaskPool
from onela.items.device_trie import DeviceTrie
from onela.items.eligibility import Eligibility, EligibilityIndex
from onela.items.trie import ItemTrie
from onela.items.vocabulary import SidVocabulary

__all__ = [
    "CatalogItem",
    "DeviceTrie",
    "Eligibility",
    "EligibilityIndex",
    "ItemCatalog",
    "ItemTrie",
    "MaskPool",
    "SidVocabulary",
    "convert_catalog",
]
