"""Chunked prefill against the token-by-token definition."""

from __future__ import annotations

import pytest
import torch

from onela import ShapeError
from onela.ops.gated_delta import gated_delta_prefill, gated_delta_recurrent_ref
from tests.tolerances import EXACT_FP64

H, HV, K, V = 2, 6, 16, 24


def inputs(lengths: list[int], dtype: torch.dtype = torch.float64) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    T = sum(lengths)
    q, k = (torch.randn(T, H, K, generator=generator, dtype=dtype) for _ in range(2))
    v = torch.randn(T, HV, V, generator=generator, dtype=dtype)
    g = -3 * torch.rand(T, HV, generator=generator, dtype=dtype)
    beta = torch.rand(T, HV, generator=generator, dtype=dtype)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return [q, k, v, g, beta], cu_seqlens


@pytest.mark.parametrize("lengths", [[1], [64], [65], [63, 1, 129], [5, 0, 64, 130, 0], [0], [200, 200]])
@pytest.mark.parametrize("chunk_size", [16, 64])
@pytest.mark.parametrize("with_state", [False, True])
def test_equals_the_definition(lengths: list[int], chunk_size: int, with_state: bool) -> None:
    tensors, cu_seqlens = inputs(lengths)
    state = torch.randn(len(lengths), HV, V, K, dtype=torch.float64) if with_state else None
    expected = gated_delta_recurrent_ref(*tensors, cu_seqlens=cu_seqlens, initial_state=state)
    got = gated_delta_prefill(*tensors, cu_seqlens=cu_seqlens, initial_state=state, chunk_size=chunk_size)
    torch.testing.assert_close(got, expected, **EXACT_FP64)


def test_in_pieces_equals_in_one_go() -> None:
    tensors, cu_seqlens = inputs([150])
    whole, final = gated_delta_prefill(*tensors, cu_seqlens=cu_seqlens)
    state, parts = None, []
    for start, end in ((0, 1), (1, 70), (70, 150)):
        piece = [x[start:end] for x in tensors]
        bounds = torch.tensor([0, end - start], dtype=torch.int32)
        o, state = gated_delta_prefill(*piece, cu_seqlens=bounds, initial_state=state)
        parts.append(o)
    torch.testing.assert_close(torch.cat(parts), whole, **EXACT_FP64)
    torch.testing.assert_close(state, final, **EXACT_FP64)


def test_strong_decay_neither_overflows_nor_divides() -> None:
    tensors, cu_seqlens = inputs([130], torch.float32)
    tensors[3] = tensors[3] * 40
    got = gated_delta_prefill(*tensors, cu_seqlens=cu_seqlens)
    expected = gated_delta_recurrent_ref(*tensors, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_heads_that_do_not_divide_are_refused() -> None:
    tensors, cu_seqlens = inputs([3])
    with pytest.raises(ShapeError, match=r"5 value heads.*2 key heads"):
        gated_delta_prefill(
            tensors[0],
            tensors[1],
            tensors[2][:, :5],
            tensors[3][:, :5],
            tensors[4][:, :5],
            cu_seqlens=cu_seqlens,
        )
