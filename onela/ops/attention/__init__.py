"""Softmax attention over one prompt and many beams."""

from onela.ops.attention.copied import beam_attention_copied
from onela.ops.attention.dispatch import beam_attention, prefill_attention
from onela.ops.attention.reference import beam_attention_ref, prefill_attention_ref

__all__ = [
    "beam_attention",
    "beam_attention_copied",
    "beam_attention_ref",
    "prefill_attention",
    "prefill_attention_ref",
]
