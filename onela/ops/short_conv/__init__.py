"""Short causal convolution."""

from onela.ops.short_conv.dispatch import short_conv_step
from onela.ops.short_conv.reference import short_conv_prefill, short_conv_step_ref

__all__ = ["short_conv_prefill", "short_conv_step", "short_conv_step_ref"]
