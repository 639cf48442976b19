"""Runs the model over a batch: packs what the requests hold into one forward, and cuts the logits to the level."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onela.engine.active import ActiveRequest
from onela.engine.scheduler import PrefillChunk
from onela.models import CausalLM
from onela.ops.indexing import spread
from onela.state import DecodeState, PrefillInputs, StepInputs


class Runner:
    """The model, its state and the heads of the SID levels.

    Args:
        model: the decoder. state: what it reads and writes.
        level_token_ids: [codebook_size] int64 of each level, tokens in code order.
    """

    def __init__(self, model: CausalLM, state: DecodeState, level_token_ids: Sequence[Tensor]) -> None:
        self.model = model
        self.state = state
        self.device = state.prompts.device
        self.level_token_ids = [ids.to(self.device) for ids in level_token_ids]
        self.heads = [model.head_rows(ids) for ids in self.level_token_ids]

    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[Tensor]:
        """Run pieces of prompts. Returns the last hidden row [1, D] of each prompt that is complete now."""
        if not chunks:
            return []
        prompts = self.state.prompts
        tokens = [token for c in chunks for token in c.request.prompt_token_ids[c.start : c.end]]
        bounds = _cumulative([c.end - c.start for c in chunks])
        inputs = PrefillInputs(
            token_ids=self._tensor(tokens, torch.int64),
            positions=torch.cat([torch.arange(c.start, c.end, device=self.device) for c in chunks]),
            cu_seqlens=self._tensor(bounds, torch.int32),
            prompts=self._tensor([_place(c.request) for c in chunks], torch.int32),
            cached_lens=self._tensor([c.start for c in chunks], torch.int32),
        )
        hidden = self.model.prefill(inputs, self.state)
        for chunk in chunks:
            assert chunk.request.prompt is not None
            prompts.extend(chunk.request.prompt, chunk.end - chunk.start)
        return [hidden[end - 1 : end] for chunk, end in zip(chunks, bounds[1:]) if chunk.completes]

    def decode(self, requests: Sequence[ActiveRequest]) -> list[Tensor]:
        """Run the last chosen token of every beam. Returns the hidden rows [W, D] of each request."""
        if not requests:
            return []
        inputs = self.step_inputs(requests)
        backend = self.state.backend
        places = max(r.first_row + r.num_rows for r in requests)
        backend.reserve(places, max(len(r.widths) - 1 for r in requests))
        backend.begin(inputs)
        backend.reorder(inputs)
        hidden = self.model.decode(inputs, self.state)
        return list(hidden.split([r.beams.width for r in requests]))

    def step_inputs(self, requests: Sequence[ActiveRequest]) -> StepInputs:
        """Pack the beams of several requests, whatever their widths and depths."""
        widths = [r.beams.width for r in requests]
        N = sum(widths)
        depth = max(r.tree.depth for r in requests)
        cu_rows = self._tensor(_cumulative(widths), torch.int32)
        prompts = self._tensor([_place(r) for r in requests], torch.int32)
        depths = self._tensor([r.tree.depth for r in requests], torch.int32)
        alive = torch.cat([r.beams.alive for r in requests])
        ancestors = torch.full((N, depth), -1, dtype=torch.int32, device=self.device)
        tokens, rows, parents, row = [], [], [], 0
        for request, width in zip(requests, widths):
            ancestors[row : row + width, : request.tree.depth] = request.tree.ancestors
            last = request.beams.codes[:, -1].clamp(min=0).to(torch.int64)
            tokens.append(self.level_token_ids[request.level - 1][last])
            rows.append(torch.arange(width, dtype=torch.int32, device=self.device) + request.first_row)
            parent = request.beams.parent_beams
            if request.tree.depth:
                parents.append((parent + request.first_row).masked_fill(parent < 0, -1))
            else:
                # The parent of a first beam is the prompt, which holds no place among the beams.
                parents.append(torch.full_like(parent, -1))
            row += width
        row_depths = spread(depths, cu_rows, N, fill=0)
        lengths = self.state.prompts.lengths[prompts.to(torch.int64)]
        return StepInputs(
            token_ids=torch.cat(tokens),
            positions=spread(lengths, cu_rows, N, fill=0) + row_depths,
            slots=torch.cat([r.step_slots for r in requests]),
            ancestors=ancestors,
            cu_rows=cu_rows,
            prompts=prompts,
            depths=depths,
            rows=torch.cat(rows).masked_fill(~alive, -1),
            parent_rows=torch.cat(parents).to(torch.int32).masked_fill(~alive, -1),
            row_prompts=spread(prompts, cu_rows, N).to(torch.int32).masked_fill(~alive, -1),
            row_depths=row_depths.to(torch.int32),
        )

    def level_logits(self, hidden: Tensor, level: int) -> Tensor:
        """[N, codebook_size] fp32: one column per code of the level."""
        return self.model.logits(hidden, self.heads[level])

    def log_normalizer(self, hidden: Tensor) -> Tensor:
        """[N] fp32: log-sum-exp over the whole vocabulary."""
        return self.model.logits(hidden).logsumexp(-1)

    def _tensor(self, values: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


def _cumulative(sizes: Sequence[int]) -> list[int]:
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    return bounds


def _place(request: ActiveRequest) -> int:
    assert request.prompt is not None, "a scheduled request holds a place in the prompt pool"
    return request.prompt.index
