"""Beam search and its options."""

from onela.decoding.beam import Beams, BeamSearch
from onela.decoding.params import BeamParams

__all__ = ["BeamParams", "BeamSearch", "Beams"]
