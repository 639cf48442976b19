"""Linear maps in 8 bits: rows of both sides rounded to float8 under a scale each, where they are made."""

from onela.ops.linear.dispatch import float8_linear, quantize_rows, rms_norm_float8, swiglu_float8
from onela.ops.linear.reference import (
    FLOAT8,
    float8_linear_ref,
    quantize_rows_ref,
    rms_norm_float8_ref,
    swiglu_float8_ref,
)

__all__ = [
    "FLOAT8",
    "float8_linear",
    "float8_linear_ref",
    "quantize_rows",
    "quantize_rows_ref",
    "rms_norm_float8",
    "rms_norm_float8_ref",
    "swiglu_float8",
    "swiglu_float8_ref",
]
