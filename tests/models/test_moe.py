"""The mixture of experts by itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from onela.models.config import ModelConfig, MoeConfig
from onela.models.moe import SparseMLP, expert_pieces, grouped_linear
from tests.tolerances import MODEL


def make(num_experts: int = 5, chosen: int = 2, shared: int = 12, *, normalize: bool = True) -> SparseMLP:
    moe = MoeConfig(num_experts, chosen, 8, shared, normalize, frozenset({0}))
    config = ModelConfig(
        model_type="qwen3_next",
        vocab_size=10,
        hidden_size=16,
        intermediate_size=8,
        layer_types=("full_attention",),
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        rotary_dim=8,
        tie_word_embeddings=False,
        max_position_embeddings=64,
        moe=moe,
    )
    module = SparseMLP(config).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return module


def inputs(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))


def by_hand(module: SparseMLP, x: Tensor) -> Tensor:
    """One token at a time, every expert, straight from the definition."""
    rows = []
    for token in x.double():
        probabilities = (module.gate.weight.double() @ token).softmax(-1)
        best = sorted(range(len(probabilities)), key=lambda e: -probabilities[e])[
            : module.moe.num_experts_per_token
        ]
        total = sum(probabilities[e] for e in best) if module.moe.normalize_weights else 1.0
        row = torch.zeros(16, dtype=torch.float64)
        for e in best:
            gate, up = (module.experts.gate_up_proj[e].double() @ token).chunk(2)
            row += probabilities[e] / total * (module.experts.down_proj[e].double() @ (F.silu(gate) * up))
        if module.moe.shared_intermediate_size:
            expert = module.shared_expert
            gate, up = expert.gate_proj.weight.double() @ token, expert.up_proj.weight.double() @ token
            opening = (module.shared_expert_gate.weight.double() @ token).sigmoid()
            row += opening * (expert.down_proj.weight.double() @ (F.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows).float()


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("num_experts", "chosen", "shared"), [(5, 2, 12), (3, 3, 0), (17, 1, 4)])
def test_matches_the_definition(num_experts: int, chosen: int, shared: int, normalize: bool) -> None:
    module = make(num_experts, chosen, shared, normalize=normalize)
    x = inputs(13)
    assert_close(module(x), by_hand(module, x), **MODEL)


def test_no_tokens() -> None:
    assert make()(inputs(0)).shape == (0, 16)


def test_a_token_does_not_depend_on_the_others() -> None:
    module = make()
    x = inputs(9)
    together = module(x)
    for i in range(9):
        assert_close(together[i : i + 1], module(x[i : i + 1]), **MODEL)


def test_all_tokens_on_one_expert() -> None:
    module = make(chosen=1)
    x = inputs(1).expand(6, 16)
    assert_close(module(x), by_hand(module, x), **MODEL)


@pytest.mark.parametrize("sizes", [[3, 0, 4], [0, 0, 5], [2, 2, 0], [0, 0, 0]])
def test_grouped_linear_with_empty_groups(sizes: list[int]) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(sum(sizes), 16, generator=generator)
    weight = torch.randn(3, 6, 16, generator=generator)
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    expected = torch.cat([part @ weight[i].T for i, part in enumerate(x.split(sizes))])
    assert_close(grouped_linear(x, weight, ends), expected, **MODEL)


def test_pieces_are_named_in_row_order() -> None:
    pieces = dict(expert_pieces([3], 2))
    prefix = "model.layers.3.mlp.experts"
    assert pieces[f"{prefix}.gate_up_proj"] == [
        f"{prefix}.0.gate_proj.weight",
        f"{prefix}.0.up_proj.weight",
        f"{prefix}.1.gate_proj.weight",
        f"{prefix}.1.up_proj.weight",
    ]
    assert pieces[f"{prefix}.down_proj"] == [f"{prefix}.0.down_proj.weight", f"{prefix}.1.down_proj.weight"]


@pytest.mark.gpu
def test_grouped_product_on_a_gpu() -> None:
    generator = torch.Generator().manual_seed(3)
    sizes = [40, 0, 1, 300, 0, 17, 0]
    x = torch.randn(sum(sizes), 256, generator=generator).to("cuda", torch.bfloat16)
    weight = torch.randn(len(sizes), 128, 256, generator=generator).to("cuda", torch.bfloat16)
    ends = torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)
    expected = torch.cat([part.float() @ weight[i].float().T for i, part in enumerate(x.split(sizes))])
    assert_close(grouped_linear(x, weight, ends).float(), expected, rtol=2**-7, atol=0.1)
    module = make(64, 8).to("cuda", torch.bfloat16)
    tokens = inputs(1000).to("cuda", torch.bfloat16)
    exact = by_hand(make(64, 8).bfloat16().float(), tokens.float().cpu())
    # Tokens whose last two experts are within a rounding of each other may choose differently.
    close = (module(tokens).float().cpu() - exact).abs().amax(-1) < 0.1 * exact.abs().amax(-1) + 0.02
    assert close.float().mean() > 0.98
