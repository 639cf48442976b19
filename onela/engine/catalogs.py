"""Versions of the catalogue: loaded aside, switched in one move, rolled back."""

from __future__ import annotations

import os
import threading

import torch

from onela.engine.served import ServedCatalog
from onela.errors import CatalogError
from onela.items import ItemCatalog, SidVocabulary


class Catalogs:
    """The version that new requests begin with, the one before it, and the one that is ready to follow.

    A request keeps the version that it began with, and a version's memory is freed when nobody has it any more. All
    methods may be called from any thread while the engine runs.

    Args:
        catalog: the first version; None: every combination of codes is legal.
        vocabulary: what every version is bound to. device: where tries and masks live.
    """

    def __init__(self, catalog: ItemCatalog | None, vocabulary: SidVocabulary, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self._device = device
        self._lock = threading.Lock()
        self._active = ServedCatalog.prepare(catalog, vocabulary, device)
        self._previous: ServedCatalog | None = None
        self._staged: ServedCatalog | None = None
        self.num_switches = 0

    @property
    def active(self) -> ServedCatalog:
        """What new requests begin with."""
        return self._active

    @property
    def previous(self) -> ServedCatalog | None:
        """What `rollback` goes back to."""
        return self._previous

    @property
    def staged(self) -> ServedCatalog | None:
        """What `load` has made ready."""
        return self._staged

    def load(self, source: str | os.PathLike[str] | ItemCatalog, *, format: str = "auto") -> ServedCatalog:
        """Read and check a version, and get it ready; what is being served does not change.

        Its trie is brought to the device and its metadata is turned into filters here, so that switching costs nothing.

        Raises:
            CatalogError: it cannot be read or bound; what was ready before stays ready.
        """
        if not isinstance(source, ItemCatalog):
            source = ItemCatalog.load(source, vocabulary=self._vocabulary, format=format)
        staged = ServedCatalog.prepare(source, self._vocabulary, self._device)
        if staged.eligibility is not None:
            _ = staged.eligibility.attributes
        with self._lock:
            self._staged = staged
        return staged

    def switch(self, version: str | None = None) -> ServedCatalog:
        """Serve the version that is ready; new requests begin with it from now on.

        Args:
            version: which one it is believed to be.
        Raises:
            CatalogError: none is ready, or it is another one.
        """
        with self._lock:
            staged = self._staged
            if staged is None:
                raise CatalogError("no catalogue is loaded to switch to")
            if version is not None and version != staged.version:
                raise CatalogError(f"the loaded catalogue is version {staged.version}, not {version}")
            self._previous, self._active, self._staged = self._active, staged, None
            self.num_switches += 1
            return staged

    def rollback(self) -> ServedCatalog:
        """Serve the version before; the present one becomes the one before, so that a second call takes it back.

        Raises:
            CatalogError: there is none.
        """
        with self._lock:
            if self._previous is None:
                raise CatalogError("there is no earlier catalogue to roll back to")
            self._previous, self._active = self._active, self._previous
            self.num_switches += 1
            return self._active
