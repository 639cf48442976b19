"""Runs a step on the device: prompts, then beams, then the choice of what follows them, each one graph on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from onela.decoding import BeamPool, PackedBeams
from onela.engine.active import ActiveRequest
from onela.engine.graphs import DecodeGraphs, ForwardGraphs, PrefillGraphs, SelectionGraphs, padded_rows
from onela.engine.packing import SelectionShape, StepShape, StepTable
from onela.engine.prefill_packing import eager_inputs
from onela.engine.scheduler import Batch, PrefillChunk
from onela.engine.served import ServedCatalog
from onela.models import LEAST, CausalLM, Rounding
from onela.ops.beams import pack_step
from onela.state import DecodeState, PrefillInputs, StepInputs

LEAST_ROWS = 1024
"""Hidden rows that there is room for at first: growing makes captured graphs worthless."""
MAX_REQUESTS = 64
"""Requests of a step that the table has room for from the start."""


class HiddenRows:
    """Hidden rows of the latest forward, on a GPU always in the same place, so that a graph finds them there.

    Args:
        size, dtype: of a row. device: where they live.

    `rows` is [R, size]. `generation` changes whenever a GPU gets more of them.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        # Room from the start: the first decode step would else make the first selection's graph worthless.
        self.rows = torch.zeros(LEAST_ROWS if device.type == "cuda" else 0, size, dtype=dtype, device=device)
        self.generation = 0

    def reserve(self, num_rows: int) -> None:
        """Make room for so many on a GPU; elsewhere `keep` takes the rows where they are."""
        if self.rows.is_cuda and num_rows > len(self.rows):
            self.rows = self.rows.new_zeros(max(num_rows, 3 * len(self.rows) // 2), self.rows.shape[1])
            self.generation += 1

    def keep(self, hidden: Tensor) -> Tensor:
        """Take these rows; returns where they are now."""
        if not self.rows.is_cuda:
            self.rows = hidden
            return hidden
        kept = self.rows[: len(hidden)]
        return kept.copy_(hidden)


class Runner:
    """The model, its state, the heads of the SID levels and the beams.

    Args:
        model: the decoder. state: what it reads and writes.
        level_token_ids: [codebook_size] int64 of each level, tokens in code order.
        cuda_graphs: run everything as CUDA graphs, on a GPU; prefill forwards of 16-bit models alone, and forwards
            under the least rounding alone.
        rounding: the model's.
    """

    def __init__(
        self,
        model: CausalLM,
        state: DecodeState,
        level_token_ids: Sequence[Tensor],
        *,
        cuda_graphs: bool = False,
        rounding: Rounding = LEAST,
    ) -> None:
        self.model = model
        self.rounding = rounding
        self.state = state
        self.device = device = state.prompts.device
        self.heads = [model.head_rows(ids.to(device)) for ids in level_token_ids]
        self.token_table = torch.cat(list(level_token_ids)).to(device, torch.int32)
        self.level_starts = list(accumulate((len(ids) for ids in level_token_ids), initial=0))
        num_levels = len(level_token_ids)
        self.beams = BeamPool(num_levels, device)
        self.table = StepTable(num_levels, MAX_REQUESTS, device)
        weight = model.lm_head.weight
        self.prompt_hidden, self.beam_hidden = (
            HiddenRows(weight.shape[1], weight.dtype, device) for _ in range(2)
        )
        self.graphs: DecodeGraphs | None = None
        self.selection_graphs: SelectionGraphs | None = None
        self.prefill_graphs: PrefillGraphs | None = None
        if cuda_graphs and device.type == "cuda":
            # Other forwards read lengths on the host: their sums depend on them.
            if rounding.least:
                self.graphs = DecodeGraphs(
                    self.decode_forward, self.table.clear, self._decode_generation, device
                )
            self.selection_graphs = SelectionGraphs(
                self.select_survivors, self.table.clear, self._selection_generation, device
            )
            # Wider rows are for comparisons: they go through the references, which read lengths on the host.
            if weight.dtype.itemsize == 2 and rounding.least:
                self.prefill_graphs = PrefillGraphs(
                    self.captured_prefill, lambda: self.prompt_hidden.generation, state.prompts, device
                )

    @property
    def num_captures(self) -> int:
        """Graphs that have been captured."""
        return sum(graphs.num_captures for graphs in self._kinds)

    @property
    def num_late_captures(self) -> int:
        """Those that were captured after `seal`."""
        return sum(graphs.num_late_captures for graphs in self._kinds)

    @property
    def _kinds(self) -> list[ForwardGraphs[Any, Any]]:
        kinds = (self.graphs, self.selection_graphs, self.prefill_graphs)
        return [graphs for graphs in kinds if graphs is not None]

    def seal(self, *, prefill: bool, decode: bool) -> None:
        """Declare that all shapes that shall come up have been captured (`ForwardGraphs.warm`).

        Args:
            prefill: of prefill forwards. decode: of decode forwards and selections.
        """
        for graphs in self._kinds:
            graphs.warm = prefill if graphs is self.prefill_graphs else decode

    def _decode_generation(self) -> object:
        return (
            self.state.generation,
            self.beams.generation,
            self.table.generation,
            self.beam_hidden.generation,
        )

    def _selection_generation(self) -> object:
        return (
            self.beams.generation,
            self.table.generation,
            self.beam_hidden.generation,
            self.prompt_hidden.generation,
        )

    # ---- what a step consists of

    def run(self, batch: Batch) -> None:
        """Hand a whole step to the device: afterwards its requests' next tokens are chosen. Nobody waits."""
        self.prefill(batch.prefill)
        self._run(batch.decode, batch.requests)

    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[Tensor]:
        """Run pieces of prompts.

        Returns:
            The last hidden row [1, D] of each prompt that is complete now. The next call may overwrite them.
        """
        if not chunks:
            return []
        prompts = self.state.prompts
        self.prompt_hidden.reserve(4 * len(chunks))  # a graph pads them to a power of four
        hidden = None if self.prefill_graphs is None else self.prefill_graphs.run(chunks)
        if hidden is None:
            hidden = self.prefill_forward(eager_inputs(chunks, prompts, self.device))
            hidden = self.prompt_hidden.keep(hidden)
        for i, chunk in enumerate(chunks):
            assert chunk.request.prompt is not None
            prompts.extend(chunk.request.prompt, chunk.end - chunk.start)
            chunk.request.hidden_row = i
        return [hidden[i : i + 1] for i, chunk in enumerate(chunks) if chunk.completes]

    def decode(self, requests: Sequence[ActiveRequest]) -> list[Tensor]:
        """Run the last chosen token of every beam.

        Returns:
            The hidden rows [W, D] of each request. The next call may overwrite them.
        """
        if not requests:
            return []
        self._run(requests, [])
        widths = [r.width for r in requests]
        return list(self.beam_hidden.rows[: sum(widths)].split(widths))

    def select(self, requests: Sequence[ActiveRequest], hidden: Sequence[Tensor] | None = None) -> None:
        """Choose the next token of every beam.

        Args:
            hidden: [W, D] of each request; None: as `prefill` and `decode` have just left them.
        """
        if hidden is not None:
            for first, kept in ((True, self.prompt_hidden), (False, self.beam_hidden)):
                rows = [h for r, h in zip(requests, hidden) if (r.level == 0) == first]
                if not rows:
                    continue
                kept.reserve(sum(map(len, rows)))
                kept.keep(torch.cat(rows))
                start = 0
                for request in requests:
                    if (request.level == 0) == first:
                        request.hidden_row, start = start, start + request.width
        self._run([], requests)

    def _run(self, decode: Sequence[ActiveRequest], choosing: Sequence[ActiveRequest]) -> None:
        """A decode forward and selections, described in one table."""
        if not decode and not choosing:
            return
        everyone = [*decode, *choosing]
        self.state.prompts.flush()
        places = max(r.first_row + r.num_rows for r in everyone)
        self.beams.reserve(places)
        if decode:
            self.state.backend.reserve(places, max(len(r.widths) - 1 for r in decode))
            slot = self.state.records.spare_start
            row = 0
            for request in decode:
                if request.in_last_step:
                    request.spare_slot = slot
                    slot += request.width
                request.hidden_row = row
                row += request.width
            self.beam_hidden.reserve(padded_rows(row))
        selections = self._selections(choosing)
        parts = max((shape.part for shape, _ in selections), default=0) + 1
        self.table.reserve(len(everyone), parts)
        # A capture needs the table to itself, so that all graphs are found before it is filled.
        launches: list[Callable[[], object]] = []
        if decode:
            exact = StepShape.of(decode)
            graph = None if self.graphs is None else self.graphs.find_padded(exact)
            launches.append(lambda: self.decode_forward(exact) if graph is None else graph.graph.replay())
        for shape, _ in selections:
            launches.append(self._selection_launch(shape))
        token_starts = [self.level_starts[r.level - 1] for r in decode]
        self.table.fill(decode, token_starts, selections)
        for launch in launches:
            launch()

    def _selection_launch(self, shape: SelectionShape) -> Callable[[], object]:
        graphs = self.selection_graphs
        # The whole vocabulary's logits would take their room in every graph.
        graph = None if graphs is None or shape.normalizer == "vocabulary" else graphs.find_padded(shape)
        return (lambda: self.select_survivors(shape)) if graph is None else graph.graph.replay

    def _selections(
        self, requests: Sequence[ActiveRequest]
    ) -> list[tuple[SelectionShape, list[ActiveRequest]]]:
        """Requests of one catalogue before one level are chosen together."""
        groups: dict[tuple[ServedCatalog, int, str], list[ActiveRequest]] = {}
        for request in requests:
            groups.setdefault((request.served, request.level, request.params.normalizer), []).append(request)
            pool = request.served.masks
            # All rows are taken before anyone looks where they lie: taking one may move them all.
            if request.eligibility is not None and pool is not None and request.mask_row is None:
                request.mask_row = pool.acquire(request.eligibility)
        taken: set[int] = set()
        found = []
        more = 1 + len(self.heads)
        for (served, level, normalizer), members in groups.items():
            part = 1 + level
            if part in taken:
                part, more = more, more + 1
            taken.add(part)
            masks = None
            if served.masks is not None and any(request.mask_row is not None for request in members):
                masks = (served.masks.rows.data_ptr(), len(served.masks.rows))
            rows = sum(request.width for request in members)
            out = sum(request.widths[level] for request in members)
            shape = SelectionShape(served, level, normalizer, part, masks, len(members), rows, out)
            found.append((shape, members))
        return found

    # ---- what is captured

    def captured_prefill(self, inputs: PrefillInputs) -> Tensor:
        """`prefill_forward`, its rows kept."""
        return self.prompt_hidden.keep(self.prefill_forward(inputs))

    def prefill_forward(self, inputs: PrefillInputs) -> Tensor:
        """New tokens of prompts through the whole model: the hidden row of each prompt's last one [B, hidden_size]."""
        return self.model.prefill(inputs, self.state)

    def decode_forward(self, shape: StepShape) -> Tensor:
        """One decode step of the requests that the table describes: [N, hidden_size], kept."""
        return self.beam_hidden.keep(self.forward(self.step_inputs(shape)))

    def forward(self, inputs: StepInputs) -> Tensor:
        """One decode step of the whole model: [N, hidden_size]."""
        backend = self.state.backend
        backend.begin(inputs)
        backend.reorder(inputs)
        return self.model.decode(inputs, self.state)

    def select_survivors(self, shape: SelectionShape) -> None:
        """One selection that the table describes."""
        selection = self.table.selection(shape)
        beams = PackedBeams.of(self.beams, selection)
        kept = self.beam_hidden if shape.level else self.prompt_hidden
        hidden = kept.rows.index_select(0, beams.hidden_rows)
        allowed = None
        if shape.masks is not None:
            assert shape.served.masks is not None
            allowed = shape.served.masks.level(shape.level)
        normalizer: Any = shape.normalizer
        if normalizer == "vocabulary":
            logits, normalizer = self.vocabulary_logits(hidden, shape.level)
        else:
            logits = self.level_logits(hidden, shape.level)
        shape.served.search.step(
            self.beams,
            selection,
            beams,
            logits,
            normalizer=normalizer,
            allowed=allowed,
        )

    def step_inputs(self, shape: StepShape) -> StepInputs:
        """The beams of the requests that the table describes, packed, whatever their widths and depths."""
        part = self.table.forward(shape.num_requests)
        fields, ancestors = pack_step(
            self.beams.rows,
            token_table=self.token_table,
            **part,
            num_rows=shape.num_rows,
            depth=shape.depth,
            num_levels=self.beams.num_levels,
        )
        token_ids, positions, slots, rows, parent_rows, row_prompts, row_depths = fields.unbind(0)
        return StepInputs(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            ancestors=ancestors,
            cu_rows=part["cu_rows"],
            prompts=part["prompts"],
            depths=part["depths"],
            rows=rows,
            parent_rows=parent_rows,
            row_prompts=row_prompts,
            row_depths=row_depths,
            some_first=shape.some_first,
        )

    def level_logits(self, hidden: Tensor, level: int) -> Tensor:
        """[N, codebook_size] fp32: one column per code of the level."""
        return self.model.logits(hidden, self.heads[level])

    def vocabulary_logits(self, hidden: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """The level's columns [N, codebook_size] fp32, and log-normalizers [N] fp32 over the whole vocabulary."""
        logits = self.model.logits(hidden)
        if self.rounding.least:
            # The level's own product: what is asked for at other normalizers too.
            return self.level_logits(hidden, level), logits.logsumexp(-1)
        # One product, and normalised before the columns are picked, as transformers does.
        tokens = self.token_table[self.level_starts[level] : self.level_starts[level + 1]]
        return logits.log_softmax(-1).index_select(1, tokens), logits.new_zeros(len(logits))
