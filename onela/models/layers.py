"""Layers that the families share. Module and parameter names are the checkpoints'."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onela.models.config import ModelConfig
from onela.models.quantized import (
    FinishedRows,
    Float8Blocks,
    Float8Linear,
    Float8Rows,
    Float8Weight,
    MadeRows,
    Rows,
    UnfinishedRows,
    Weight,
    added_float8,
    gated_float8,
    linear,
)
from onela.models.rounding import Rounded
from onela.ops.gated_delta import gated_delta_layer_prefill
from onela.ops.linear import (
    added_linear,
    has_added,
    heads_linear,
    linear_swiglu,
    rms_norm_float8,
    swiglu_float8,
)
from onela.state import DecodeState, GatedDeltaWeights, PrefillInputs, StepInputs

Rope = tuple[Tensor, Tensor]


class RMSNorm(Rounded):
    """RMSNorm; `zero_centered` multiplies by `1 + weight`, as Qwen3.5 and Qwen3-Next do."""

    def __init__(self, size: int, eps: float, *, zero_centered: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if zero_centered else torch.ones(size))
        self.eps = eps
        self.zero_centered = zero_centered

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The norm of x; with a residual, of their sum, which stays in the residual."""
        return self.rounding.rms_norm(
            x, self.weight, eps=self.eps, zero_centered=self.zero_centered, residual=residual
        )

    def after(self, product: nn.Module, x: MadeRows, residual: Tensor, reader: nn.Module) -> Rows:
        """Add a product to the residual; the norm of the sum, as whoever reads it takes it.

        Args:
            product: the linear map, [size, D]. x: [N, D], what it reads. residual: [N, size], changed in place.
            reader: whoever reads the norm.
        """
        if (
            isinstance(x, Tensor)
            and isinstance(product, nn.Linear)
            and product.bias is None
            and isinstance(reader, FusedLinear)
            and isinstance(reader.fused, Tensor)
            and has_added(x, product.weight)
            # An unfinished norm's rows may be large.
            and x.dtype == torch.bfloat16
            and residual.dtype == torch.float32
        ):
            made = added_linear(
                x,
                product.weight,
                residual=residual,
                norm_weight=self.weight,
                zero_centered=self.zero_centered,
            )
            return UnfinishedRows(*made, self.eps)
        if isinstance(reader, FusedLinear) and isinstance(reader.fused, Float8Weight):
            blocks = added_float8(
                product, x, residual, reader.fused, self.weight, self.eps, self.zero_centered
            )
            if blocks is not None:
                return blocks
        return self.rows_for(reader, product(x), residual)

    def rows_for(self, reader: nn.Module, added: Tensor | None, stream: Tensor) -> FinishedRows:
        """The norm of a residual stream after this has been added to it, in float8 when its reader takes it so.

        Args:
            added: [N, hidden_size]; None: nothing. stream: [N, hidden_size], changed in place when something is added.
        """
        x, residual = (stream, None) if added is None else (added, stream)
        if not (isinstance(reader, FusedLinear) and reader.takes_float8):
            return self(x, residual)
        rounded = rms_norm_float8(
            x, self.weight, eps=self.eps, zero_centered=self.zero_centered, residual=residual
        )
        return Float8Rows(*rounded, x.dtype)


class RotaryEmbedding(Rounded):
    """Cosines and sines of packed positions: [T] -> two [T, rotary_dim / 2] fp32."""

    def __init__(self, rotary_dim: int, theta: float) -> None:
        super().__init__()
        self.rotary_dim = rotary_dim
        self.theta = theta
        self._frequencies: Tensor | None = None

    def forward(self, positions: Tensor) -> Rope:
        return self.rounding.rotary_angles(positions, self.frequencies(positions.device))

    def frequencies(self, device: torch.device) -> Tensor:
        """[rotary_dim / 2] fp32, made once per device."""
        if self._frequencies is None or self._frequencies.device != device:
            # transformers makes them on the host, whose power is rounded otherwise.
            maker = device if self.rounding.least else torch.device("cpu")
            exponent = (
                torch.arange(0, self.rotary_dim, 2, device=maker, dtype=torch.float32) / self.rotary_dim
            )
            self._frequencies = (1.0 / self.theta**exponent).to(device)
        return self._frequencies


class FusedLinear(Rounded):
    """Linear maps of one input, run as one matrix product once the weights are in place.

    The parts stay ordinary parameters under the checkpoint's names; `fuse` makes them views of one tensor.
    """

    fused: Weight | None = None
    fused_parts: tuple[nn.Linear, ...] = ()

    kept_wide: tuple[str, ...] = ()
    """Names of linear maps that `quantize` leaves as they are."""

    @property
    def takes_float8(self) -> bool:
        """Whether the input may come in float8."""
        return isinstance(self.fused, Float8Weight)

    def split_linear(self, x: Rows, parts: list[nn.Linear], *, first: int = 0) -> list[Tensor]:
        """Apply parts to x: [N, D] -> [N, size] each, slices of one result when fused.

        Args:
            first: the row of the fused weight where these parts, which adjoin, begin.
        """
        if self.fused is None:
            return [part(x) for part in parts]
        sizes = [part.out_features for part in parts]
        return list(linear(x, self.fused[first : first + sum(sizes)]).split(sizes, dim=-1))

    def fuse_linear(self, parts: list[nn.Linear]) -> None:
        """Move the parts' weights into one tensor. Parts with a bias stay apart."""
        if any(part.bias is not None for part in parts):
            return
        fused = torch.cat([part.weight.data for part in parts])
        start = 0
        for part in parts:
            part.weight = nn.Parameter(fused[start : start + part.out_features], requires_grad=False)
            start += part.out_features
        self.fused, self.fused_parts = fused, tuple(parts)

    def fuse(self) -> None:
        """Called once, after the weights are loaded and moved."""

    def quantize(self) -> None:
        """Round the weights of this module's own linear maps to float8. Called once, after `fuse`."""
        if isinstance(self.fused, Tensor):
            self.fused = Float8Weight.of(self.fused)
            for part in self.fused_parts:
                part.weight = nn.Parameter(part.weight.data.new_empty(0), requires_grad=False)
        for name, child in list(self.named_children()):
            if isinstance(child, nn.Linear) and child not in self.fused_parts and name not in self.kept_wide:
                setattr(self, name, Float8Linear(child))


def add_linear(stream: Tensor, x: MadeRows, layer: nn.Module) -> Tensor | None:
    """Apply a linear map whose result belongs to the residual stream [N, D].

    Returns:
        None where the matrix product has added to the stream itself; else the result, for somebody to add.
    """
    weight = layer.weight if isinstance(layer, nn.Linear) and layer.bias is None else None
    if weight is not None and isinstance(x, Tensor) and x.is_cuda and stream.dtype == x.dtype == weight.dtype:
        torch.addmm(stream, x, weight.t(), out=stream)
        return None
    result: Tensor = layer(x)
    return result


class MLP(FusedLinear):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Rows) -> Tensor:
        return self.down_proj(self.inner(x))

    def inner(self, x: Rows) -> MadeRows:
        """What `down_proj` reads: [N, hidden_size] -> [N, intermediate_size]."""
        if self.fused is None:
            return F.silu(self.gate_proj(x)) * self.up_proj(x)
        if isinstance(x, UnfinishedRows):
            assert isinstance(self.fused, Tensor), "a norm is finished by a product with wide weights"
            return linear_swiglu(x.values, self.fused, squares=x.squares, eps=x.eps)
        if isinstance(self.fused, Tensor):
            assert isinstance(x, Tensor), "rows in float8 go to weights in float8"
            return linear_swiglu(x, self.fused)
        if isinstance(x, (Float8Rows, Float8Blocks)):
            blocks = gated_float8(x, self.fused)
            if blocks is not None:
                return blocks
        gate_up = linear(x, self.fused)
        return Float8Rows(*swiglu_float8(gate_up), gate_up.dtype)

    def fuse(self) -> None:
        self.fuse_linear([self.gate_proj, self.up_proj])


class Attention(FusedLinear):
    """Softmax attention with normed queries and keys.

    With `gated`, q_proj yields for each head its query, then a gate whose sigmoid multiplies the head's
    output (Qwen3.5, Qwen3-Next); without, it is Qwen3's.
    """

    # A small product, whose rows nobody would round on the way: in float8 it takes no less time.
    kept_wide = ("o_proj",)

    def __init__(self, config: ModelConfig, layer: int, *, gated: bool) -> None:
        super().__init__()
        self.layer = layer
        self.gated = gated
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        D, HQ, HKV = config.head_dim, self.num_heads, self.num_kv_heads
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, HQ * D * (2 if gated else 1), bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, HKV * D, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, HKV * D, bias=bias)
        self.o_proj = nn.Linear(HQ * D, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(D, config.rms_norm_eps, zero_centered=gated)
        self.k_norm = RMSNorm(D, config.rms_norm_eps, zero_centered=gated)

    def prefill(
        self,
        x: FinishedRows,
        rope: Rope,
        inputs: PrefillInputs,
        state: DecodeState,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Attention of new tokens, whose keys and values go to their pages.

        Args:
            x: [T, hidden_size]. rows: [B] int64, the last token of each prompt, the only ones with queries; None: all.
        Returns:
            What `out` reads, [T or B, HQ * head_dim].
        """
        k_cache, v_cache = state.prompts.cache(self.layer)
        # One launch norms, rotates and fills the pages where a head holds a whole number of rotations.
        joined = self.rounding.least and self.head_dim % (2 * rope[0].shape[-1]) == 0
        tables = inputs.tables if rows is None and joined else None
        if rows is not None:
            q, k, v, gate = self._project_rows(x, rope, rows)
        elif tables is None:
            q, k, v, gate = self._project(x, rope)
        else:
            q, k, v, gate = self._project(
                x, rope, k_cache=k_cache, v_cache=v_cache, page_rows=tables.page_rows
            )
        o = self.rounding.prefill_attention(
            q,
            k,
            v,
            k_cache=k_cache,
            v_cache=v_cache,
            page_table=state.prompts.page_table,
            cached_lens=inputs.cached_lens,
            cu_seqlens=inputs.cu_seqlens,
            prompts=inputs.prompts,
            last_only=rows is not None,
            kept=tables is not None,
            tables=inputs.tables,
        )
        return self._gated(o, gate)

    @property
    def out(self) -> nn.Module:
        """The projection that reads what `prefill` and `decode` return."""
        return self.o_proj

    def decode(self, x: Rows, rope: Rope, inputs: StepInputs, state: DecodeState) -> Tensor:
        """Attention of one token per beam: x [N, hidden_size] -> what `out` reads, [N, HQ * head_dim]."""
        q, k, v, gate = self._project_heads(x, rope)
        k_cache, v_cache = state.prompts.cache(self.layer)
        o = self.rounding.beam_attention(
            q,
            k,
            v,
            k_cache=k_cache,
            v_cache=v_cache,
            page_table=state.prompts.page_table,
            prompt_lens=state.prompts.lengths,
            records_k=state.records.layer(self.layer, "k"),
            records_v=state.records.layer(self.layer, "v"),
            **inputs.index,
        )
        return self._gated(o, gate)

    def fuse(self) -> None:
        self.fuse_linear([self.q_proj, self.k_proj, self.v_proj])

    def _project(self, x: Rows, rope: Rope, **pages: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q [T, HQ, D], k and v [T, HKV, D], and the gate [T, HQ, D] if there is one; of x [T, hidden_size].

        Args:
            pages: where k and v go besides, as `qk_norm_rotary` takes it.
        """
        T = x.shape[0]
        q, k, v = self.split_linear(x, [self.q_proj, self.k_proj, self.v_proj])
        gate = None
        if self.gated:
            q, gate = q.view(T, self.num_heads, 2 * self.head_dim).chunk(2, dim=-1)
        cos, sin = rope
        v = v.reshape(T, self.num_kv_heads, self.head_dim)
        q, k = self.rounding.qk_norm_rotary(
            q.reshape(T, self.num_heads, self.head_dim),
            k.reshape(T, self.num_kv_heads, self.head_dim),
            q_weight=self.q_norm.weight,
            k_weight=self.k_norm.weight,
            cos=cos,
            sin=sin,
            eps=self.q_norm.eps,
            zero_centered=self.q_norm.zero_centered,
            # Beside their gates heads would lie apart.
            in_place=not self.gated,
            v=v,
            **pages,
        )
        return q, k, v, gate

    def _project_heads(self, x: Rows, rope: Rope) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """As `_project`, as one op where the weights are one and wide."""
        if not isinstance(self.fused, Tensor):
            return self._project(x, rope)
        assert not isinstance(x, (Float8Rows, Float8Blocks)), "rows in float8 go to weights in float8"
        values, squares, squares_eps = (
            (x.values, x.squares, x.eps) if isinstance(x, UnfinishedRows) else (x, None, 0.0)
        )
        cos, sin = rope
        return heads_linear(
            values,
            self.fused,
            q_weight=self.q_norm.weight,
            k_weight=self.k_norm.weight,
            cos=cos,
            sin=sin,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            eps=self.q_norm.eps,
            zero_centered=self.q_norm.zero_centered,
            squares=squares,
            squares_eps=squares_eps,
        )

    def _project_rows(
        self, x: FinishedRows, rope: Rope, rows: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """As `_project`, but only these rows [B] have queries and gates: [B, HQ, D]."""
        T, B = x.shape[0], rows.shape[0]
        D, (cos, sin) = self.head_dim, rope
        q = self.split_linear(x.index_select(0, rows), [self.q_proj])[0]
        k, v = self.split_linear(x, [self.k_proj, self.v_proj], first=self.q_proj.out_features)
        gate = None
        if self.gated:
            q, gate = q.view(B, self.num_heads, 2 * D).chunk(2, dim=-1)
        q = self.rounding.rotary(
            self.q_norm(q.reshape(B, self.num_heads, D)), cos.index_select(0, rows), sin.index_select(0, rows)
        )
        k = self.k_norm(k.reshape(T, self.num_kv_heads, D))
        return q, self.rounding.rotary(k, cos, sin), v.reshape(T, self.num_kv_heads, D), gate

    def _gated(self, o: Tensor, gate: Tensor | None) -> Tensor:
        if gate is not None:
            o = self.rounding.sigmoid_gate(o, gate)
        return o.reshape(o.shape[0], -1)


class ConvWeight(nn.Module):
    """The short convolution's weight under the checkpoint's name and shape, [conv_dim, 1, kernel_size]."""

    def __init__(self, conv_dim: int, kernel_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(conv_dim, 1, kernel_size))


class NormWeight(nn.Module):
    """A norm's weight under the checkpoint's name, for an op that applies it itself."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class GatedDeltaNet(FusedLinear):
    """The linear-attention mixer of Qwen3.5. Families with other projections override `project`."""

    kept_wide = ("out_proj",)

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.H, self.HV = config.linear_num_key_heads, config.linear_num_value_heads
        self.K, self.V = config.linear_key_head_dim, config.linear_value_head_dim
        self.norm_eps = config.rms_norm_eps
        conv_dim = 2 * self.H * self.K + self.HV * self.V
        self.conv1d = ConvWeight(conv_dim, config.linear_conv_kernel_dim)
        self.A_log = nn.Parameter(torch.zeros(self.HV))
        self.dt_bias = nn.Parameter(torch.ones(self.HV))
        self.norm = NormWeight(self.V)
        self.out_proj = nn.Linear(self.HV * self.V, config.hidden_size, bias=False)
        self._make_projections(config, conv_dim)

    def _make_projections(self, config: ModelConfig, conv_dim: int) -> None:
        self.in_proj_qkv = nn.Linear(config.hidden_size, conv_dim, bias=False)
        self.in_proj_z = nn.Linear(config.hidden_size, self.HV * self.V, bias=False)
        self.in_proj_b = nn.Linear(config.hidden_size, self.HV, bias=False)
        self.in_proj_a = nn.Linear(config.hidden_size, self.HV, bias=False)

    def project(self, x: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """mixed_qkv [N, conv_dim], z [N, HV*V], b [N, HV], a [N, HV]."""
        parts = [self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a]
        mixed, z, b, a = self.split_linear(x, parts)
        return mixed, z, b, a

    def fuse(self) -> None:
        self.fuse_linear([self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a])

    @property
    def weights(self) -> GatedDeltaWeights:
        """The small tensors between the projections."""
        return GatedDeltaWeights(
            conv_weight=self.conv1d.weight[:, 0],
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            norm_weight=self.norm.weight,
            norm_eps=self.norm_eps,
        )

    def prefill(
        self,
        x: FinishedRows,
        rope: Rope,
        inputs: PrefillInputs,
        state: DecodeState,
        rows: Tensor | None = None,
    ) -> Tensor:
        """As in `Attention`."""
        mixed, z, b, a = self.project(x)
        o = gated_delta_layer_prefill(
            *(mixed, b, a),
            conv_weight=self.conv1d.weight[:, 0],
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            recurrent_state=state.prompts.layer(self.layer, "recurrent_state"),
            conv_state=state.prompts.layer(self.layer, "conv_state"),
            cu_seqlens=inputs.cu_seqlens,
            prompts=inputs.prompts,
            cached_lens=inputs.cached_lens,
            tables=inputs.tables,
            round_steps=not self.rounding.least,
        )
        if rows is not None:
            o, z = o.index_select(0, rows), z.index_select(0, rows)
        z = z.reshape(-1, self.HV, self.V)
        gated = self.rounding.gated_rms_norm(o, z, self.norm.weight, eps=self.norm_eps)
        return gated.reshape(o.shape[0], -1)

    @property
    def out(self) -> nn.Module:
        """As in `Attention`."""
        return self.out_proj

    def decode(self, x: Rows, rope: Rope, inputs: StepInputs, state: DecodeState) -> Tensor:
        """One token per beam: x [N, hidden_size] -> what `out` reads, [N, HV * V]."""
        return state.backend.layer_step(self.layer, self.weights, *self.project(x), inputs)
