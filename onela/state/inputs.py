"""The metadata of one forward pass: made in one place, frozen, and passed down through the layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from onela.ops.indexing import RowIndex, to_device


@dataclass(frozen=True)
class PrefillInputs:
    """New tokens of several prompts, packed.

    Attributes:
        token_ids: [T] int64. positions: [T] int64.
        cu_seqlens: [B+1] int32, new tokens of each prompt.
        prompts: [B] int32, places in the prompt pool.
        cached_lens: [B] int32, tokens that each prompt holds already.

    The last three are read on the host; on the CPU, reading them waits for no device.
    """

    token_ids: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    prompts: Tensor
    cached_lens: Tensor

    @cached_property
    def places(self) -> Tensor:
        """[B] int64, `prompts` on the device of the tokens."""
        return to_device(self.prompts.to(torch.int64), self.token_ids.device)

    @cached_property
    def fresh(self) -> Tensor:
        """[B] bool on the device of the tokens: prompts that hold nothing yet."""
        return to_device(self.cached_lens == 0, self.token_ids.device)


@dataclass(frozen=True)
class StepInputs:
    """One decode step of all live beams, packed request by request.

    Attributes:
        token_ids: [N] int32 or int64; any valid token for a padding row. positions: [N] int32 or int64.
        slots: [N] int32, where each row's records go; PAD for a padding row.
        ancestors: [N, D] int32, slots of each row's ancestors, oldest first, PAD past the request's depth.
        cu_rows: [B+1] int32. prompts: [B] int32. depths: [B] int32, ancestors of the request's rows.
        rows: [N] int32, each beam's own place among its request's beams (for backends that hold something per beam).
        parent_rows: [N] int32, the parent's place; PAD at depth 0 and for padding rows.
        row_prompts: [N] int32 and row_depths: [N] int32, `prompts` and `depths` spread over the rows; PAD and
            0 for padding.
        some_first: whether any row may stand at depth 0.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    ancestors: Tensor
    cu_rows: Tensor
    prompts: Tensor
    depths: Tensor
    rows: Tensor
    parent_rows: Tensor
    row_prompts: Tensor
    row_depths: Tensor
    some_first: bool = True

    @property
    def index(self) -> RowIndex:
        """The five tensors by which an op finds a row's past."""
        return {
            "slots": self.slots,
            "ancestors": self.ancestors,
            "cu_rows": self.cu_rows,
            "prompts": self.prompts,
            "depths": self.depths,
        }
