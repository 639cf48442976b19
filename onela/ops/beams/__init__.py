"""The rows in which live beams are kept: packed into a step, and moved on by what a selection has chosen."""

from onela.ops.beams.dispatch import advance_beams, pack_beams, pack_step
from onela.ops.beams.reference import advance_beams_ref, pack_beams_ref, pack_step_ref

__all__ = [
    "advance_beams",
    "advance_beams_ref",
    "pack_beams",
    "pack_beams_ref",
    "pack_step",
    "pack_step_ref",
]
