"""Norms, rotary positions and the gated MLP product."""

from onela.ops.norm.dispatch import (
    gated_rms_norm,
    qk_norm_rotary,
    rms_norm,
    rotary,
    rotary_angles,
    sigmoid_gate,
    swiglu,
)
from onela.ops.norm.reference import (
    gated_rms_norm_ref,
    qk_norm_rotary_ref,
    rms_norm_ref,
    rotary_angles_ref,
    rotary_ref,
    sigmoid_gate_ref,
    swiglu_ref,
)

__all__ = [
    "gated_rms_norm",
    "gated_rms_norm_ref",
    "qk_norm_rotary",
    "qk_norm_rotary_ref",
    "rms_norm",
    "rms_norm_ref",
    "rotary",
    "rotary_angles",
    "rotary_angles_ref",
    "rotary_ref",
    "sigmoid_gate",
    "sigmoid_gate_ref",
    "swiglu",
    "swiglu_ref",
]
