"""Linear maps that are joined with what follows, and those in 8 bits, whose rows are rounded under a scale each."""

from onela.ops.linear.dispatch import (
    float8_linear,
    linear_swiglu,
    quantize_rows,
    rms_norm_float8,
    swiglu_float8,
)
from onela.ops.linear.reference import (
    FLOAT8,
    float8_linear_ref,
    linear_swiglu_ref,
    quantize_rows_ref,
    rms_norm_float8_ref,
    swiglu_float8_ref,
)

__all__ = [
    "FLOAT8",
    "float8_linear",
    "float8_linear_ref",
    "linear_swiglu",
    "linear_swiglu_ref",
    "quantize_rows",
    "quantize_rows_ref",
    "rms_norm_float8",
    "rms_norm_float8_ref",
    "swiglu_float8",
    "swiglu_float8_ref",
]
