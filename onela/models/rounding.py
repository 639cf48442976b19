"""Where a 16-bit model rounds: which ops run between its matrix products, and what these may be joined with.

`LEAST` rounds as seldom as its kernels can. `TRANSFORMERS` rounds wherever `transformers` does, since every step there
is an op of torch's whose result has the model's dtype: the same ops on the same rows, one by one, with nothing joined.
The sums of matrix products and of attention are torch's own in both; as they depend on the shapes, `TRANSFORMERS` keeps
to the shapes that `transformers` uses: one product for each linear map, attention over whole rows of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onela.config import Rounding as RoundingName
from onela.ops.attention import (
    beam_attention,
    beam_attention_copied,
    prefill_attention,
    prefill_attention_ref,
)
from onela.ops.norm import (
    gated_rms_norm,
    gated_rms_norm_ref,
    qk_norm_rotary,
    qk_norm_rotary_ref,
    rms_norm,
    rms_norm_ref,
    rotary,
    rotary_angles,
    rotary_angles_ref,
    rotary_ref,
    sigmoid_gate,
    sigmoid_gate_ref,
    swiglu,
    swiglu_ref,
)

HEAD_ROWS = 16384
"""Rows of a bf16 head that a CPU has in fp32 at a time."""

Op = Callable[..., Tensor]
Ops = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Rounding:
    """A way to round.

    Attributes:
        name: as the engine's option has it.
        least: whether neighbours may be joined: projections of one input with each other, products with what is added
            to them; and whether the residual stream of beams is fp32. False: every step is an op of its own, and every
            result has the model's dtype.
        rms_norm, gated_rms_norm, qk_norm_rotary, rotary, rotary_angles, sigmoid_gate, swiglu: of `onela.ops.norm`.
        beam_attention, prefill_attention: of `onela.ops.attention`.
        logits: from hidden rows [N, D] and rows of the head [C, D] to logits [N, C] fp32.
    """

    name: RoundingName
    least: bool
    rms_norm: Op
    gated_rms_norm: Op
    qk_norm_rotary: Ops
    rotary: Op
    rotary_angles: Ops
    sigmoid_gate: Op
    swiglu: Op
    beam_attention: Op
    prefill_attention: Op
    logits: Callable[[Tensor, Tensor], Tensor]

    def stream_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of the residual stream of beams, in a model of this dtype."""
        return torch.promote_types(dtype, torch.float32) if self.least else dtype


def unrounded_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """[N, D] and [C, D] -> [N, C] fp32, sums that nobody has rounded."""
    if hidden.dtype == torch.float32:
        return F.linear(hidden, weight)
    if hidden.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    # Part by part: a copy of a whole head in fp32 is not worth its memory.
    wide = hidden.to(torch.float32)
    parts = [F.linear(wide, part.to(torch.float32)) for part in weight.split(HEAD_ROWS)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def rounded_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """[N, D] and [C, D] -> [N, C] fp32, each rounded to the rows' dtype before."""
    return F.linear(hidden, weight).to(torch.float32)


LEAST = Rounding(
    name="least",
    least=True,
    rms_norm=rms_norm,
    gated_rms_norm=gated_rms_norm,
    qk_norm_rotary=qk_norm_rotary,
    rotary=rotary,
    rotary_angles=rotary_angles,
    sigmoid_gate=sigmoid_gate,
    swiglu=swiglu,
    beam_attention=beam_attention,
    prefill_attention=prefill_attention,
    logits=unrounded_logits,
)
TRANSFORMERS = Rounding(
    name="transformers",
    least=False,
    rms_norm=rms_norm_ref,
    gated_rms_norm=gated_rms_norm_ref,
    qk_norm_rotary=qk_norm_rotary_ref,
    rotary=rotary_ref,
    rotary_angles=rotary_angles_ref,
    sigmoid_gate=sigmoid_gate_ref,
    swiglu=swiglu_ref,
    beam_attention=beam_attention_copied,
    prefill_attention=prefill_attention_ref,
    logits=rounded_logits,
)
ROUNDINGS: dict[str, Rounding] = {rounding.name: rounding for rounding in (LEAST, TRANSFORMERS)}


class Rounded(nn.Module):
    """A module that asks its rounding which op to run. `CausalLM.round_as` sets it, before anything is fused."""

    rounding = LEAST
