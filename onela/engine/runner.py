"""Runs the model over a batch: packs what the requests hold into one forward, and cuts the logits to the level."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from onela.engine.active import ActiveRequest
from onela.engine.graphs import DecodeGraphs
from onela.engine.packing import StepBuffers, StepShape
from onela.engine.scheduler import PrefillChunk
from onela.models import CausalLM
from onela.ops.indexing import device_tensor
from onela.state import DecodeState, PrefillInputs, StepInputs


class Runner:
    """The model, its state and the heads of the SID levels.

    Args:
        model: the decoder. state: what it reads and writes.
        level_token_ids: [codebook_size] int64 of each level, tokens in code order.
        cuda_graphs: run decode forwards as CUDA graphs, on a GPU.
    """

    def __init__(
        self,
        model: CausalLM,
        state: DecodeState,
        level_token_ids: Sequence[Tensor],
        *,
        cuda_graphs: bool = False,
    ) -> None:
        self.model = model
        self.state = state
        self.device = state.prompts.device
        self.heads = [model.head_rows(ids.to(self.device)) for ids in level_token_ids]
        self.token_table = torch.cat(list(level_token_ids)).to(self.device, torch.int32)
        self.level_starts = list(accumulate((len(ids) for ids in level_token_ids), initial=0))
        self.graphs: DecodeGraphs | None = None
        if cuda_graphs and self.device.type == "cuda":
            self.graphs = DecodeGraphs(self.forward, lambda: state.generation, self.device)

    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[Tensor]:
        """Run pieces of prompts. Returns the last hidden row [1, D] of each prompt that is complete now."""
        if not chunks:
            return []
        prompts = self.state.prompts
        tokens = [token for c in chunks for token in c.request.prompt_token_ids[c.start : c.end]]
        positions = [place for c in chunks for place in range(c.start, c.end)]
        bounds = list(accumulate((c.end - c.start for c in chunks), initial=0))
        inputs = PrefillInputs(
            token_ids=device_tensor(tokens, torch.int64, self.device),
            positions=device_tensor(positions, torch.int64, self.device),
            cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
            prompts=torch.tensor([_place(c.request) for c in chunks], dtype=torch.int32),
            cached_lens=torch.tensor([c.start for c in chunks], dtype=torch.int32),
        )
        hidden = self.model.prefill(inputs, self.state)
        for chunk in chunks:
            assert chunk.request.prompt is not None
            prompts.extend(chunk.request.prompt, chunk.end - chunk.start)
        return [hidden[end - 1 : end] for chunk, end in zip(chunks, bounds[1:]) if chunk.completes]

    def decode(self, requests: Sequence[ActiveRequest]) -> list[Tensor]:
        """Run the last chosen token of every beam.

        Returns:
            The hidden rows [W, D] of each request. The next call may overwrite them.
        """
        if not requests:
            return []
        places = max(r.first_row + r.num_rows for r in requests)
        self.state.backend.reserve(places, max(len(r.widths) - 1 for r in requests))
        slot = self.state.records.spare_start
        for request in requests:
            if request.in_last_step:
                request.spare_slot = slot
                slot += request.beams.width
        hidden = None
        if self.graphs is not None:
            hidden = self.graphs.run(requests, self.token_table, self.level_starts)
        if hidden is None:
            hidden = self.forward(self.step_inputs(requests))
        return list(hidden.split([r.beams.width for r in requests]))

    def forward(self, inputs: StepInputs) -> Tensor:
        """One decode step of the whole model: [N, hidden_size]."""
        backend = self.state.backend
        backend.begin(inputs)
        backend.reorder(inputs)
        return self.model.decode(inputs, self.state)

    def step_inputs(self, requests: Sequence[ActiveRequest], shape: StepShape | None = None) -> StepInputs:
        """Pack the beams of several requests, whatever their widths and depths; padded up to `shape`, when given."""
        buffers = StepBuffers(shape or StepShape.of(requests), self.device)
        buffers.fill(requests, self.token_table, self.level_starts)
        return buffers.inputs()

    def level_logits(self, hidden: Tensor, level: int) -> Tensor:
        """[N, codebook_size] fp32: one column per code of the level."""
        return self.model.logits(hidden, self.heads[level])

    def log_normalizer(self, hidden: Tensor) -> Tensor:
        """[N] fp32: log-sum-exp over the whole vocabulary."""
        return self.model.logits(hidden).logsumexp(-1)


def _place(request: ActiveRequest) -> int:
    assert request.prompt is not None, "a scheduled request holds a place in the prompt pool"
    return request.prompt.index
