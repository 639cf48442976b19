"""What a layer asks of whoever holds what its beams remember.

All backends share the short convolution, the gates and the gated norm, so that a comparison changes one thing only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from torch import Tensor

from onela.config import RecurrentBackendName
from onela.ops.gated_delta import gated_delta_gates
from onela.ops.indexing import RowIndex
from onela.ops.norm import gated_rms_norm, gated_rms_norm_ref
from onela.ops.short_conv import short_conv_step
from onela.state.geometry import GatedDeltaGeometry, LayerGeometry
from onela.state.inputs import StepInputs
from onela.state.prompt import PromptPool
from onela.state.records import Records

BackendName = RecurrentBackendName
BACKENDS: tuple[BackendName, ...] = get_args(RecurrentBackendName)
REPLAYING: tuple[BackendName, ...] = ("replay", "records_moved")
"""Backends that read the prompt's state as `replay_step` does."""


@dataclass(frozen=True)
class GatedDeltaWeights:
    """The small tensors of a layer that act between its in-projection and its out-projection.

    Attributes:
        conv_weight: [conv_dim, kernel_size]. A_log, dt_bias: [HV]. norm_weight: [V]. norm_eps: of the gated RMSNorm.
    """

    conv_weight: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm_weight: Tensor
    norm_eps: float


class RecurrentBackend(ABC):
    """How the beams' recurrent states are held.

    Args:
        layers: geometry of each layer of the model.
        prompts: the prompts' states, read only here.
        records: the append-only rows; every backend keeps the convolution's inputs there.
        round_steps: whether what the parts of a layer's step hand on is rounded to the rows' dtype, as in a chain of
            16-bit ops: the convolution's sum, the write strength, the recurrence's output.
    """

    name: BackendName

    def __init__(
        self,
        layers: Sequence[LayerGeometry],
        prompts: PromptPool,
        records: Records,
        *,
        round_steps: bool = False,
    ) -> None:
        self.geometry = {i: layer for i, layer in enumerate(layers) if isinstance(layer, GatedDeltaGeometry)}
        self.prompts = prompts
        self.records = records
        self.round_steps = round_steps

    def reserve(self, num_rows: int, max_depth: int) -> None:
        """Make room for `num_rows` beams of at most `max_depth` decode steps."""

    def begin(self, inputs: StepInputs) -> None:
        """Called first in every step: take in the rows that stand at depth 0."""

    def reorder(self, inputs: StepInputs) -> None:
        """Called after `begin`: bring what each beam holds to its survivor, where that needs a copy."""

    def layer_step(
        self,
        layer: int,
        weights: GatedDeltaWeights,
        mixed_qkv: Tensor,
        z: Tensor,
        b: Tensor,
        a: Tensor,
        inputs: StepInputs,
    ) -> Tensor:
        """One decode step of a layer, from raw in-projections to the input of its out-projection.

        Args:
            layer: index of the layer in the model.
            mixed_qkv: [N, conv_dim]. z: [N, HV*V]. b, a: [N, HV].
        Returns:
            [N, HV*V] in mixed_qkv's dtype.
        """
        geometry = self.geometry[layer]
        N = mixed_qkv.shape[0]
        H, HV = geometry.num_key_heads, geometry.num_value_heads
        K, V = geometry.key_dim, geometry.value_dim
        mixed = short_conv_step(
            mixed_qkv,
            weights.conv_weight,
            conv_state=self.prompts.layer(layer, "conv_state"),
            records_x=self.record(layer, "x"),
            **self.index(inputs),
            round_sum=self.round_steps,
        )
        q, k, v = mixed.split([H * K, H * K, HV * V], dim=-1)
        g, beta = gated_delta_gates(
            a, b, A_log=weights.A_log, dt_bias=weights.dt_bias, round_beta=self.round_steps
        )
        o = self.step(layer, q.reshape(N, H, K), k.reshape(N, H, K), v.reshape(N, HV, V), g, beta, inputs)
        norm = gated_rms_norm
        if self.round_steps:
            o, norm = o.to(mixed.dtype), gated_rms_norm_ref
        gated = norm(o, z.reshape(N, HV, V), weights.norm_weight, eps=weights.norm_eps)
        return gated.reshape(N, HV * V)

    @abstractmethod
    def step(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, inputs: StepInputs
    ) -> Tensor:
        """The recurrence alone. q, k: [N, H, K]; v: [N, HV, V]; g, beta: [N, HV]. Returns o [N, HV, V] fp32."""

    def record(self, layer: int, part: str) -> Tensor:
        """The rows of one layer's record that `index` points into."""
        return self.records.layer(layer, part)

    def index(self, inputs: StepInputs) -> RowIndex:
        """Where each row's records go, and where its ancestors' are."""
        return inputs.index

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that this backend holds for the beams' recurrent states (the prompts' not counted)."""

    @property
    def own_nbytes(self) -> int:
        """Bytes of the backend's own tensors: what it holds beside the prompts and the records."""
        return 0

    @property
    def generation(self) -> tuple[int, ...]:
        """Changes whenever a tensor of the backend is replaced by a larger one."""
        return ()
