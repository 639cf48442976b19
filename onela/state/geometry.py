"""What the state must know of a layer: sizes, and nothing of the model they come from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GatedDeltaGeometry:
    """Sizes of one Gated DeltaNet layer.

    Args:
        num_key_heads: H, query and key heads.
        num_value_heads: HV, value heads, a multiple of H.
        key_dim: K, size of a query or key head.
        value_dim: V, size of a value head.
        conv_kernel_size: taps of the short convolution.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel_size: int = 4

    @property
    def conv_dim(self) -> int:
        """Channels of the short convolution: all q, k and v heads side by side."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def state_numel(self) -> int:
        """Numbers in one recurrent state."""
        return self.num_value_heads * self.value_dim * self.key_dim


@dataclass(frozen=True)
class AttentionGeometry:
    """Sizes of one softmax-attention layer's cache: `num_kv_heads` heads of `head_dim`."""

    num_kv_heads: int
    head_dim: int


LayerGeometry = GatedDeltaGeometry | AttentionGeometry
