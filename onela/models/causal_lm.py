"""A decoder-only language model over prompts and beams. It knows tokens and places, not requests or scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onela.models.config import LINEAR, ModelConfig
from onela.models.layers import (
    MLP,
    Attention,
    FusedLinear,
    GatedDeltaNet,
    RMSNorm,
    Rope,
    RotaryEmbedding,
    add_linear,
)
from onela.models.quantized import Rows
from onela.models.rounding import ROUNDINGS, Rounded
from onela.state import DecodeState, PrefillInputs, StepInputs


class DecoderLayer(Rounded):
    """A mixer under the name the family gives it, and an MLP, each after a norm and added to the residual."""

    def __init__(
        self, config: ModelConfig, mixer_name: str, mixer: nn.Module, mlp: nn.Module, *, zero_centered: bool
    ) -> None:
        super().__init__()
        self.mixer_name = mixer_name
        self.add_module(mixer_name, mixer)
        self.mlp = mlp
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, zero_centered=zero_centered)
        self.post_attention_layernorm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, zero_centered=zero_centered
        )

    @property
    def mixer(self) -> Attention | GatedDeltaNet:
        """The layer's mixer, whatever its name."""
        mixer = getattr(self, self.mixer_name)
        assert isinstance(mixer, (Attention, GatedDeltaNet))
        return mixer

    def prefill(
        self,
        h: Tensor,
        added: Tensor | None,
        rope: Rope,
        inputs: PrefillInputs,
        state: DecodeState,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layer over new tokens of prompts.

        Args:
            h: [T, hidden_size], the residual stream, changed in place.
            added: [T, hidden_size], what the layer before adds to h; None when its last product has added it.
            rows: the tokens that are asked for; None: all.
        Returns:
            h of these tokens, and what the MLP adds to it, or None.
        """
        x = self.mixer.prefill(self.input_layernorm.rows_for(self.mixer, added, h), rope, inputs, state, rows)
        if rows is not None:
            h = h.index_select(0, rows)
        if not self.rounding.least:
            mixed = self.mixer.out(x)
            return h, self.mlp(self.post_attention_layernorm.rows_for(self.mlp, mixed, h))
        mixed = add_linear(h, x, self.mixer.out)
        normed = self.post_attention_layernorm.rows_for(self.mlp, mixed, h)
        if isinstance(self.mlp, MLP):
            return h, add_linear(h, self.mlp.inner(normed), self.mlp.down_proj)
        return h, self.mlp(normed)

    def decode(
        self,
        h: Tensor,
        rows: Rows,
        rope: Rope,
        inputs: StepInputs,
        state: DecodeState,
        next_norm: RMSNorm,
        reader: nn.Module,
    ) -> Rows:
        """Run the layer.

        Args:
            h: [N, hidden_size], the residual stream, changed in place.
            rows: the norm of h, as the mixer takes it.
            next_norm: of the layer that comes next, or the model's last one. reader: whoever reads that norm.
        Returns:
            next_norm of h, as the reader takes it.
        """
        x = self.mixer.decode(rows, rope, inputs, state)
        rows = self.post_attention_layernorm.after(self.mixer.out, x, h, self.mlp)
        if isinstance(self.mlp, MLP):
            return next_norm.after(self.mlp.down_proj, self.mlp.inner(rows), h, reader)
        return next_norm.rows_for(reader, self.mlp(rows), h)


class Decoder(nn.Module):
    """Embedding, layers, final norm: the `model.` part of a checkpoint."""

    def __init__(self, config: ModelConfig, layers: list[DecoderLayer], *, zero_centered: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, zero_centered=zero_centered)

    def __iter__(self) -> Iterator[DecoderLayer]:
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer


class CausalLM(Rounded, ABC):
    """Base of the families: they say which mixers and MLPs a layer has, and how their configuration is read."""

    zero_centered_norms = True
    gated_attention = True
    quantization = "none"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        layers = [
            DecoderLayer(
                config,
                *self.make_mixer(config, i),
                self.make_mlp(config, i),
                zero_centered=self.zero_centered_norms,
            )
            for i in range(config.num_hidden_layers)
        ]
        self.model = Decoder(config, layers, zero_centered=self.zero_centered_norms)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.rotary = RotaryEmbedding(config.rotary_dim, config.rope_theta)

    @classmethod
    @abstractmethod
    def read_config(cls, values: dict[str, Any]) -> ModelConfig:
        """Turn the parsed `config.json` of this family into a `ModelConfig`."""

    @classmethod
    def rename(cls, name: str) -> str | None:
        """The parameter that a checkpoint's tensor belongs to; None for a tensor that text models do not use."""
        return name

    @classmethod
    def pieces(cls, config: ModelConfig) -> Mapping[str, Sequence[str]]:
        """Parameters that a checkpoint may also store in pieces: the pieces' names, as `rename` gives them.

        The pieces are equal shares of the parameter's rows, from first to last; its rows are what remains when all
        axes but the last are joined.
        """
        return {}

    def make_mixer(self, config: ModelConfig, layer: int) -> tuple[str, nn.Module]:
        """Name and module of a layer's mixer."""
        if config.layer_types[layer] == LINEAR:
            return "linear_attn", GatedDeltaNet(config, layer)
        return "self_attn", Attention(config, layer, gated=self.gated_attention)

    def make_mlp(self, config: ModelConfig, layer: int) -> nn.Module:
        """A layer's MLP."""
        return MLP(config.hidden_size, config.intermediate_size)

    def round_as(self, name: str) -> None:
        """Round as `ROUNDINGS[name]` does. Called before anything is fused, and only by whoever then does not fuse."""
        for module in self.modules():
            if isinstance(module, Rounded):
                module.rounding = ROUNDINGS[name]

    def fuse(self) -> None:
        """Join projections of one input. Called once, after the weights are loaded and moved."""
        for module in self.modules():
            if isinstance(module, FusedLinear):
                module.fuse()

    def quantize(self) -> None:
        """Round the weights of mixers and MLPs to float8. Called once, after `fuse`.

        Embedding and head, norms, convolutions, the gates' constants, the mixers' out-projections, routers and a
        mixture's experts stay as they are.
        """
        for module in list(self.modules()):
            if isinstance(module, FusedLinear):
                module.quantize()
        self.quantization = "fp8"

    def prefill(self, inputs: PrefillInputs, state: DecodeState) -> Tensor:
        """Run new tokens of several prompts and leave their state behind.

        Returns:
            [T, hidden_size], after the final norm, for every new token; with `last_rows`, [B, hidden_size] for those
            alone, and the last layer runs for them what nobody else needs.
        """
        h, added = self.model.embed_tokens(inputs.token_ids), None
        rope = self.rotary(inputs.positions)
        last = len(self.model.layers) - 1
        for i, layer in enumerate(self.model):
            # Products of fewer rows may sum in another order.
            rows = inputs.last_rows if i == last and self.rounding.least else None
            h, added = layer.prefill(h, added, rope, inputs, state, rows)
        if not self.rounding.least and inputs.last_rows is not None and added is not None:
            h, added = (rows.index_select(0, inputs.last_rows) for rows in (h, added))
        return self.model.norm(h) if added is None else self.model.norm(added, h)

    def decode(self, inputs: StepInputs, state: DecodeState) -> Tensor:
        """Run one token of every live beam.

        Returns:
            [N, hidden_size], after the final norm.
        """
        added = self.model.embed_tokens(inputs.token_ids)
        # Beams of nearly equal score differ by less than bf16 shows, so their residual stream is fp32: rounding it
        # twice a layer would decide between them. A prompt's is not: it is the same for all of them.
        h = torch.zeros_like(added, dtype=self.rounding.stream_dtype(added.dtype))
        rope = self.rotary(inputs.positions)
        layers = list(self.model)
        rows: Rows = layers[0].input_layernorm.rows_for(layers[0].mixer, added, h)
        readers = [(layer.input_layernorm, layer.mixer) for layer in layers[1:]]
        for layer, (norm, reader) in zip(layers, [*readers, (self.model.norm, self.lm_head)]):
            rows = layer.decode(h, rows, rope, inputs, state, norm, reader)
        assert isinstance(rows, Tensor), "the head reads rows as they are"
        return rows

    def logits(self, hidden: Tensor, head: Tensor | None = None) -> Tensor:
        """fp32 logits over `head` [C, hidden_size], or over the whole vocabulary.

        Under the least rounding they are never rounded to bf16: neighbours would tie, and ties decide which beams
        survive. Nor are those that only the normalizer is read off: beams are compared with each other's.
        """
        return self.rounding.logits(hidden, self.lm_head.weight if head is None else head)

    def head_rows(self, token_ids: Tensor) -> Tensor:
        """Copy the rows of the head that belong to these tokens: the head of one SID level."""
        return self.lm_head.weight.data[token_ids.to(self.lm_head.weight.device)].contiguous()
