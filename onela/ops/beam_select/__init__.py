"""Selection of the best continuations of every request."""

from onela.ops.beam_select.dispatch import beam_select
from onela.ops.beam_select.reference import beam_select_ref

__all__ = ["beam_select", "beam_select_ref"]
