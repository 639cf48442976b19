"""Every tolerance of the tests, the same on every machine. `rtol` and `atol` are those of `torch.testing`."""

from __future__ import annotations

EXACT_FP64 = {"rtol": 1e-10, "atol": 1e-10}
"""The same sums in another order, in fp64."""

REPLAY = {
    "fp32": {"rtol": 1e-5, "atol": 1e-5},
    "split": {"rtol": 1e-4, "atol": 5e-5},
    "bf16": {"rtol": 2**-7, "atol": 2e-4},
}
"""Kernels of one decode step against their reference: fp32 sums in another order; an fp32 state that the kernel
halves into two bf16 (16 bits of mantissa) and the reference does not; values stored as bf16 (one unit in the last
place: the interpreter truncates)."""

MODEL = {"rtol": 1e-4, "atol": 1e-4}
"""Logits and scores of a whole fp32 model against transformers: the same sums in another order, layer after layer."""

ATTENTION = {
    "fp32": {"rtol": 1e-5, "atol": 1e-5},
    "bf16": {"rtol": 2**-7, "atol": 2**-8},
}
"""Softmax attention: fp32 sums in another order; weights and outputs rounded to bf16, over values of size one."""

LAYER_STEP = {
    "fp32": {"rtol": 2e-4, "atol": 2e-4},
    "bf16": {"rtol": 2**-5, "atol": 2e-2},
}
"""The fused layer step. fp32: a state of 16 bits of mantissa, under a norm. bf16: q, k and v are rounded before replay
(the interpreter truncates), so that single values differ by units in the last place, and the norm divides by them."""

ROWS = {
    "fp32": {"rtol": 2e-5, "atol": 2e-5},
    "bf16": {"rtol": 2**-5, "atol": 2**-5},
}
"""Norms, rotary positions, gates and the convolution's step: fp32 sums in another order; up to three roundings to
bf16 (the interpreter truncates)."""

PREFILL = {"mean": 2**-6, "largest": 2**-4}
"""The chunked recurrence of 16-bit rows against the reference in fp32, relative to the mean and the largest value: keys
after their norm, the chunks' states and their deltas are rounded to 16 bits, and enter sums over a whole prompt."""
