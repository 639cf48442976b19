"""Beam search and its options."""

from onela.decoding.beam import BeamSearch, PackedBeams, Selection
from onela.decoding.params import BeamParams
from onela.decoding.pool import BeamPool, Beams, HostBeams

__all__ = ["BeamParams", "BeamPool", "BeamSearch", "Beams", "HostBeams", "PackedBeams", "Selection"]
