"""Runs the model over a batch: packs what the requests hold into one forward, and cuts the logits to the level."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from onela.engine.active import ActiveRequest
from onela.engine.graphs import DecodeGraphs, PrefillGraphs
from onela.engine.packing import StepBuffers, StepShape
from onela.engine.prefill_packing import eager_inputs
from onela.engine.scheduler import PrefillChunk
from onela.models import CausalLM
from onela.state import DecodeState, PrefillInputs, StepInputs


class Runner:
    """The model, its state and the heads of the SID levels.

    Args:
        model: the decoder. state: what it reads and writes.
        level_token_ids: [codebook_size] int64 of each level, tokens in code order.
        cuda_graphs: run forwards as CUDA graphs, on a GPU; prefill forwards of 16-bit models alone.
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
        self.prefill_graphs: PrefillGraphs | None = None
        if cuda_graphs and self.device.type == "cuda":
            self.graphs = DecodeGraphs(self.forward, lambda: state.generation, self.device)
            # Wider rows are for comparisons: they go through the references, which read lengths on the host.
            if model.lm_head.weight.dtype.itemsize == 2:
                self.prefill_graphs = PrefillGraphs(self.prefill_forward, state.prompts, self.device)

    @property
    def num_captures(self) -> int:
        """Forwards that have been captured as CUDA graphs."""
        return sum(graphs.num_captures for graphs in (self.graphs, self.prefill_graphs) if graphs is not None)

    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[Tensor]:
        """Run pieces of prompts.

        Returns:
            The last hidden row [1, D] of each prompt that is complete now. The next call may overwrite them.
        """
        if not chunks:
            return []
        prompts = self.state.prompts
        hidden = None if self.prefill_graphs is None else self.prefill_graphs.run(chunks)
        if hidden is None:
            hidden = self.prefill_forward(eager_inputs(chunks, prompts, self.device))
        for chunk in chunks:
            assert chunk.request.prompt is not None
            prompts.extend(chunk.request.prompt, chunk.end - chunk.start)
        return [hidden[i : i + 1] for i, chunk in enumerate(chunks) if chunk.completes]

    def prefill_forward(self, inputs: PrefillInputs) -> Tensor:
        """New tokens of prompts through the whole model: the hidden row of each prompt's last one [B, hidden_size]."""
        return self.model.prefill(inputs, self.state)

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
