"""Models with random weights to measure on, and how near two arms' answers are."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from onela.config import EngineConfig
from onela.engine import Engine, Result
from onela.engine.verify import VARIANTS
from onela.items import SidVocabulary
from onela.models import CausalLM
from onela.models.layers import MLP, Attention
from onela.models.quantized import Weight, linear
from onela.models.registry import FAMILIES

SHAPE_08B: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 65536,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "full_attention_interval": 4,
    "tie_word_embeddings": True,
}
TINY: dict[str, Any] = {
    **SHAPE_08B,
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}


def random_model(values: dict[str, Any], dtype: torch.dtype, device: torch.device, seed: int = 0) -> CausalLM:
    """A model of this configuration with random weights, decays and steps as after usual training."""
    torch.manual_seed(seed)
    with torch.device(device):
        family = FAMILIES[values["model_type"]]
        model = family(family.read_config(values))
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data = parameter.data.uniform_(1, 16).log()
            continue
        if name.endswith("dt_bias"):
            steps = torch.empty_like(parameter).uniform_(-6.9, -2.3).exp()
            parameter.data = steps + torch.log(-torch.expm1(-steps))
            continue
        if "norm" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
        else:
            gain = 2.0 if "embed" in name else 1.0
            parameter.data.normal_(0, gain / parameter.shape[-1] ** 0.5)
        parameter.data = parameter.data.to(dtype)
    model.requires_grad_(False)
    model.fuse()
    return model.eval()


def vocabulary_of(tokens: int, codebook: int) -> SidVocabulary:
    """`tokens` levels of `codebook` codes."""
    return SidVocabulary.from_token_ids(
        [range(64 + i * codebook, 64 + (i + 1) * codebook) for i in range(tokens)]
    )


def engine_of(model: CausalLM, vocabulary: SidVocabulary, arm: str, **options: Any) -> Engine:
    """An engine that differs from the others by its arm alone."""
    config = EngineConfig(max_batch_tokens=1 << 20, **dict(VARIANTS)[arm], **options)
    return Engine(model, vocabulary, config=config)


def matrix_products(model: CausalLM, rows: int) -> Callable[[], Any]:
    """All matrix products of a decode step on `rows` rows, and nothing else; those of mixtures of experts left out.

    Over a quantized model the rounding of the rows is part of it.
    """
    weight = model.lm_head.weight
    products = []
    for layer in model.model:
        mixer, mlp = layer.mixer, layer.mlp
        out = mixer.o_proj if isinstance(mixer, Attention) else mixer.out_proj
        matrices = [mixer.fused, out.weight]
        if isinstance(mlp, MLP):
            matrices += [mlp.fused, mlp.down_proj.weight]
        products += [
            (torch.randn(rows, matrix.shape[1], device=weight.device).to(weight.dtype), matrix)
            for matrix in matrices
            if isinstance(matrix, Weight)
        ]
    return lambda: [linear(x, matrix) for x, matrix in products]


def overlap(left: Sequence[Result], right: Sequence[Result]) -> tuple[float, float]:
    """Mean share of common items, and the largest difference of their scores."""
    shares, difference = [], 0.0
    for a, b in zip(left, right):
        scores = {item.sid: item.cum_logprob for item in a.items}
        common = [item for item in b.items if item.sid in scores]
        shares.append(len(common) / max(1, len(scores)))
        difference = max([difference, *(abs(i.cum_logprob - scores[i.sid]) for i in common)])
    return statistics.mean(shares), difference
