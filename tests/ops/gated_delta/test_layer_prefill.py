"""Prefill of a layer on the tables of a padded shape, against the reference over the prompts alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from onela.errors import ShapeError
from onela.ops.gated_delta import gated_delta_layer_prefill_ref, gated_delta_prefill, split_state
from onela.ops.prefill_tables import CHUNK, NewTokens, PrefillShape, PrefillTables, TableLayout
from tests.tolerances import PREFILL

pytest.importorskip("triton")
from onela.ops.gated_delta import chunk_fla, layer_prefill

# Triton's interpreter turns scalars into loop bounds in a way that numpy 1.25 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

# New tokens and cached ones of each prompt.
PROMPTS = [
    [(70, 0), (3, 0)],
    [(1, 0)],
    [(64, 0), (128, 0), (63, 0)],
    [(70, 5), (1, 2), (2, 64), (130, 0)],
    [(0, 7), (5, 0), (65, 65)],
]


def tables_of(
    prompts: Sequence[tuple[int, int]], padding: int, spare: int, device: torch.device
) -> PrefillTables:
    shape = PrefillShape(
        sum(new for new, _ in prompts) + padding,
        len(prompts) + spare,
        max(padding, *(new for new, _ in prompts)),
        goes_on=any(cached for _, cached in prompts),
    )
    layout = TableLayout(shape, 16)
    tokens = [
        NewTokens(np.zeros(new, np.int32), cached, place, [])
        for (new, cached), place in zip(prompts, places_of(prompts))
    ]
    return layout.tables(layout.host(tokens).to(device))


def places_of(prompts: Sequence[tuple[int, int]]) -> list[int]:
    """Out of order, each prompt its own, below the number of places."""
    return [1, 4, 0, 3, 6][: len(prompts)]


def rule_by_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None, tables: PrefillTables
) -> tuple[Tensor, Tensor]:
    """What fla-core does, in PyTorch: its kernels do not run under the interpreter."""
    decay = torch.zeros_like(g)
    for n, t in tables.chunks.tolist():
        start, end = tables.cu_seqlens[n : n + 2].tolist()
        rows = slice(start + t * CHUNK, min(end, start + (t + 1) * CHUNK))
        if rows.start < end:
            decay[rows] = torch.diff(g[rows], dim=0, prepend=torch.zeros_like(g[:1])) * math.log(2)
    return gated_delta_prefill(q, k, v, decay, beta, cu_seqlens=tables.cu_seqlens, initial_state=initial)


def layer(
    prompts: Sequence[tuple[int, int]], heads: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device,
    *, padding: int, split: bool,
) -> dict[str, Any]:  # fmt: skip
    H, HV, K, V = heads
    generator = torch.Generator().manual_seed(len(prompts) + padding)
    C, T, P = 2 * H * K + HV * V, sum(new for new, _ in prompts) + padding, len(prompts) + 3

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    states = random(P, HV, V, K)
    # Places that hold nothing of a prompt that begins hold anything.
    states[-1], tails = torch.nan, random(P, C, 3)
    tails[-1] = torch.nan
    wide = random(T, C + 2 * HV).to(dtype).to(device)
    return {
        "mixed_qkv": wide[:, :C],
        "b": wide[:, C : C + HV],
        "a": wide[:, C + HV :],
        "conv_weight": (random(C, 4) / 2).to(dtype).to(device),
        "A_log": torch.rand(HV, generator=generator).to(device),
        "dt_bias": random(HV).to(device),
        "recurrent_state": (split_state(states) if split else states).to(device),
        "conv_state": tails.to(dtype).to(device),
    }


def whole(states: Tensor) -> Tensor:
    return states.float().sum(2) if states.dim() == 5 else states


@pytest.mark.parametrize(
    ("prompts", "heads", "padding", "split"),
    [
        (PROMPTS[0], (2, 4, 32, 16), 5, False),
        (PROMPTS[1], (1, 1, 16, 32), 0, True),
        (PROMPTS[2], (1, 1, 16, 32), 70, True),
        (PROMPTS[3], (2, 4, 32, 16), 0, True),
        (PROMPTS[3], (1, 1, 16, 32), 70, False),
        (PROMPTS[3], (2, 4, 32, 32), 70, False),
        (PROMPTS[4], (1, 1, 64, 64), 0, True),
        (PROMPTS[2], (1, 2, 128, 128), 5, True),
        (PROMPTS[4], (2, 4, 32, 16), 70, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("own", [True, False], ids=["triton", "fla"])
def test_a_padded_layer_equals_the_reference_and_writes_only_its_prompts(
    prompts: list[tuple[int, int]],
    heads: tuple[int, int, int, int],
    padding: int,
    split: bool,
    own: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device.type == "cuda" and own and not layer_prefill.takes(*heads[2:], device):
        pytest.skip("heads that the kernels do not take")
    monkeypatch.setattr(layer_prefill, "takes", lambda *_: own)
    # The interpreter rounds to bf16 by cutting off.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    if device.type == "cuda" and not own and chunk_fla.chunked_kernels() is None:
        pytest.skip("fla-core is not installed")
    if device.type == "cpu":
        monkeypatch.setattr(chunk_fla, "chunked_rule", rule_by_reference)
        monkeypatch.setattr(chunk_fla, "tune", lambda *_: None)
    given = layer(prompts, heads, dtype, device, padding=padding, split=split)
    expected = {name: tensor.clone() for name, tensor in given.items()}
    tables = tables_of(prompts, padding, 2, device)
    o = layer_prefill.gated_delta_layer_prefill_chunked(**given, tables=tables)
    T = sum(new for new, _ in prompts)
    live = [i for i, (new, _) in enumerate(prompts) if new]
    wanted = gated_delta_layer_prefill_ref(
        **{n: t[:T] if n in ("mixed_qkv", "a", "b") else t for n, t in expected.items()},
        cu_seqlens=torch.tensor(np.cumsum([0, *(prompts[i][0] for i in live)]), dtype=torch.int32),
        prompts=torch.tensor([places_of(prompts)[i] for i in live], dtype=torch.int32),
        cached_lens=torch.tensor([prompts[i][1] for i in live], dtype=torch.int32),
    )
    assert o.shape == (T + padding, heads[1], heads[3])
    states, others = whole(given["recurrent_state"]), whole(expected["recurrent_state"])
    touched = [places_of(prompts)[i] for i in live]
    for given_part, wanted_part in ((o[:T].float(), wanted.float()), (states[touched], others[touched])):
        difference, size = given_part - wanted_part, wanted_part.square().mean().sqrt()
        assert difference.square().mean().sqrt() < PREFILL["mean"] * size
        assert difference.abs().max() < PREFILL["largest"] * wanted_part.abs().max()
    untouched = [p for p in range(len(prompts) + 3) if p not in touched]
    assert torch.equal(states[untouched].nan_to_num(7.0), others[untouched].nan_to_num(7.0))
    assert torch.equal(given["conv_state"].nan_to_num(7.0), expected["conv_state"].nan_to_num(7.0))


def test_channels_that_fit_no_number_of_heads_are_refused(device: torch.device) -> None:
    given = layer([(3, 0)], (2, 4, 32, 16), torch.float16, device, padding=0, split=False)
    given["mixed_qkv"] = given["mixed_qkv"][:, :-1]
    with pytest.raises(ShapeError, match=r"mixed_qkv: 191 channels"):
        layer_prefill.gated_delta_layer_prefill_chunked(**given, tables=tables_of([(3, 0)], 0, 0, device))
