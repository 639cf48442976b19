"""One version of the catalogue with everything that decoding derives from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onela.decoding import BeamSearch
from onela.engine.request import Request
from onela.errors import RequestError
from onela.items import Eligibility, EligibilityIndex, ItemCatalog, MaskPool, SidVocabulary


@dataclass(frozen=True, eq=False)
class ServedCatalog:
    """What a request keeps hold of from its start to its end, whatever is switched meanwhile.

    Attributes:
        catalog: the items; None: every combination of codes is legal, and results carry no items.
        search: beam search over its trie.
        eligibility: compiles filters. masks: their rows on the device.
    """

    catalog: ItemCatalog | None
    search: BeamSearch
    eligibility: EligibilityIndex | None
    masks: MaskPool | None

    @classmethod
    def prepare(
        cls, catalog: ItemCatalog | None, vocabulary: SidVocabulary, device: torch.device
    ) -> ServedCatalog:
        """Bind a catalogue to the vocabulary and bring its trie to the device. Raises `CatalogError`."""
        if catalog is None:
            return cls(None, BeamSearch(None), None, None)
        # Legal continuations are looked up in the vocabulary's code order.
        bound = catalog.bind(vocabulary)
        index = EligibilityIndex(bound)
        return cls(bound, BeamSearch(bound.trie.to(device)), index, MaskPool(index, device))

    @property
    def version(self) -> str | None:
        """The catalogue's version."""
        return None if self.catalog is None else self.catalog.version

    def compile(self, request: Request) -> Eligibility | None:
        """What a request may get; None: everything. Raises `RequestError`."""
        given = {
            "exclude_item_ids": request.exclude_item_ids,
            "allow_item_ids": request.allow_item_ids,
            "filter": request.filter,
        }
        if self.eligibility is not None:
            return self.eligibility.compile(**given)  # type: ignore[arg-type]
        for field, value in given.items():
            if value is not None:
                raise RequestError(field, "needs a catalogue, and none is loaded")
        return None
