"""Linear maps that are joined with their neighbours, and those in 8 bits, whose rows are rounded under a scale each."""

from onela.ops.linear.dispatch import (
    added_linear,
    float8_linear,
    has_added,
    has_heads,
    has_joined,
    heads_linear,
    linear_swiglu,
    normed_linear,
    quantize_rows,
    rms_norm_float8,
    swiglu_float8,
)
from onela.ops.linear.reference import (
    FLOAT8,
    added_linear_ref,
    float8_linear_ref,
    heads_linear_ref,
    linear_swiglu_ref,
    normed_linear_ref,
    quantize_rows_ref,
    rms_norm_float8_ref,
    swiglu_float8_ref,
)

__all__ = [
    "FLOAT8",
    "added_linear",
    "added_linear_ref",
    "float8_linear",
    "float8_linear_ref",
    "has_added",
    "has_heads",
    "has_joined",
    "heads_linear",
    "heads_linear_ref",
    "linear_swiglu",
    "linear_swiglu_ref",
    "normed_linear",
    "normed_linear_ref",
    "quantize_rows",
    "quantize_rows_ref",
    "rms_norm_float8",
    "rms_norm_float8_ref",
    "swiglu_float8",
    "swiglu_float8_ref",
]
