"""The metadata of one forward pass: made in one place, frozen, and passed down through the layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from onela.ops.indexing import RowIndex
from onela.ops.prefill_tables import PrefillTables


@dataclass(frozen=True)
class PrefillInputs:
    """New tokens of several prompts, packed.

    Attributes:
        token_ids, positions: [T] int32 or int64.
        cu_seqlens: [B+1] int32, new tokens of each prompt.
        prompts: [B] int32, places in the prompt pool.
        cached_lens: [B] int32, tokens that each prompt holds already.
        last_rows: [B] int32 or int64, the row of each prompt's last new token; the model then answers for these
            alone. None: for all.
        tables: where the tokens lie, on a GPU, for the kernels that can be captured; None: for the references alone.

    References read cu_seqlens, prompts and cached_lens on the host: on the CPU, that waits for no device.
    """

    token_ids: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    prompts: Tensor
    cached_lens: Tensor
    last_rows: Tensor | None = None
    tables: PrefillTables | None = None


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
