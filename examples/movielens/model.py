"""The recommender's model: a small Qwen3.5 hybrid of `transformers`, and the recipe that decides its weights."""

from __future__ import annotations

import functools
import inspect
import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from .semantic_ids import SidOptions
from .tokens import BOS, PAD, SidTokens


@dataclass(frozen=True)
class Recipe:
    """Everything that, with the data, decides the trained weights.

    Attributes:
        sids: how films become codes.
        layer_types: the mixers, in order.
        gdn_heads: key heads, value heads, key head size, value head size of the gated-delta layers.
        initializer_range: standard deviation of the first weights.
        window: films per training window, and at most so many in a prompt.
        epochs, batch: passes over the events; windows per step.
        lr, muon_lr, weight_decay: AdamW for embeddings, norms and convolutions, Muon for the other matrices.
        dropout: of token embeddings, of what each mixer and MLP adds, and of the last hidden state.
        jitter: films change places with neighbours about so far away, anew in every epoch.
        reverse: share of the histories that an epoch reads backwards.
        teacher_weight, teacher_power: share and sharpness of the neighbours' distribution in the training targets.
        ema: decay of the running mean of the weights, which is what is kept.
        seed: of weights, windows and dropout.
    """

    sids: SidOptions = field(default_factory=SidOptions)
    hidden_size: int = 128
    intermediate_size: int = 256
    layer_types: tuple[str, ...] = (
        "linear_attention",
        "linear_attention",
        "linear_attention",
        "full_attention",
    )
    gdn_heads: tuple[int, int, int, int] = (2, 4, 32, 32)
    initializer_range: float = 0.05
    window: int = 42
    epochs: int = 4
    batch: int = 16
    lr: float = 2e-3
    muon_lr: float = 0.02
    weight_decay: float = 0.1
    dropout: float = 0.2
    jitter: float = 5.0
    reverse: float = 0.5
    teacher_weight: float = 0.7
    teacher_power: float = 2.5
    ema: float = 0.99
    seed: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Recipe:
        """The inverse of `to_dict`, also after a round through JSON."""
        fields = _with_tuples(values)
        fields["sids"] = SidOptions(**_with_tuples(values["sids"]))
        return cls(**fields)


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def new_model(
    recipe: Recipe, tokens: SidTokens, centroids: list[torch.Tensor] | None = None
) -> Qwen3_5ForCausalLM:
    """An untrained model.

    Args:
        centroids: of the codes, per level [codebook size, dim]; the token embeddings start as their projection, so that
            codes of films watched together start together.
    """
    key_heads, value_heads, key_size, value_size = recipe.gdn_heads
    config = Qwen3_5TextConfig(
        vocab_size=len(tokens.names),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=len(recipe.layer_types),
        layer_types=list(recipe.layer_types),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=key_size,
        linear_value_head_dim=value_size,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=None,
        initializer_range=recipe.initializer_range,
    )
    torch.manual_seed(recipe.seed)
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        if centroids is not None:
            rows = torch.cat(centroids).float()
            # Orthonormal rows: distances between centroids survive the projection.
            basis = torch.linalg.qr(torch.randn(recipe.hidden_size, rows.shape[1]))[0].T
            start = rows @ basis
            start = start / start.std() * 0.04
            model.model.embed_tokens.weight[BOS + 1 :] = start + 0.01 * torch.randn_like(start)
        for module in model.modules():
            if isinstance(module, modeling_qwen3_5.Qwen3_5GatedDeltaNet):
                # The heads start with memories of 4 to 128 tokens; the class starts them with hardly any.
                memory = torch.logspace(math.log10(4), math.log10(128), module.num_v_heads)
                module.A_log.zero_()
                module.dt_bias.copy_((1 / memory).expm1().log())
    return model


def use_reference_ops(chunk_size: int = 32) -> None:
    """Makes `transformers` compute Qwen3.5 in PyTorch when there is no GPU.

    Where flash-linear-attention is installed, `transformers` calls its Triton kernels even on a CPU, and they cannot
    run there.

    Args:
        chunk_size: of the chunked gated delta rule; at these head sizes 32 takes two thirds of the time of 64.
    """
    if torch.cuda.is_available():
        return
    for name in (
        "torch_chunk_gated_delta_rule",
        "torch_recurrent_gated_delta_rule",
        "causal_conv1d_fn",
        "causal_conv1d_update",
    ):
        function = getattr(modeling_qwen3_5, name)
        function = inspect.unwrap(function.func if isinstance(function, functools.partial) else function)
        if name == "torch_chunk_gated_delta_rule":
            function = functools.partial(function, chunk_size=chunk_size)
        setattr(modeling_qwen3_5, name, function)
