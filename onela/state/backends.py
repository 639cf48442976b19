"""Ways to hold what a beam remembers, behind one interface, in one pipeline.

`replay` keeps an append-only record per beam and step; `records_moved` keeps the same records in a buffer per beam
and copies them at each reorder; `full_state` keeps a whole state per beam, as ordinary engines do; `replay_ssm` keeps a
checkpoint and a buffer of transitions per beam and rebuilds the state at each step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onela.config import CheckpointMode, FullStateMode
from onela.errors import ConfigError
from onela.ops.gated_delta import (
    full_state_step,
    gated_delta_layer_step,
    replay_ssm_step,
    replay_step,
)
from onela.ops.indexing import PAD, RowIndex, copy_rows, gather_rows
from onela.state.backend import BACKENDS, BackendName, GatedDeltaWeights, RecurrentBackend
from onela.state.geometry import GatedDeltaGeometry, LayerGeometry
from onela.state.inputs import StepInputs
from onela.state.pools import GrowingTensors
from onela.state.prompt import PromptPool
from onela.state.records import Records

CHECKPOINT_ROWS = "checkpoint_rows"
TRANSITION = ("g", "delta", "k")


class ReplayBackend(RecurrentBackend):
    """Records and an ancestry index; nothing is built, copied or moved.

    Args:
        fused: True: a layer's step is one op, in as few launches as its kernels allow. False: convolution, gates,
            replay and norm are separate ops, as for the other backends.
        round_steps: as in `RecurrentBackend`; then no step is fused.
    """

    name: BackendName = "replay"

    def __init__(
        self,
        layers: Sequence[LayerGeometry],
        prompts: PromptPool,
        records: Records,
        *,
        fused: bool = True,
        round_steps: bool = False,
    ) -> None:
        super().__init__(layers, prompts, records, round_steps=round_steps)
        self.fused = fused and not round_steps

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
        if not self.fused:
            return super().layer_step(layer, weights, mixed_qkv, z, b, a, inputs)
        return gated_delta_layer_step(
            mixed_qkv,
            z,
            b,
            a,
            conv_weight=weights.conv_weight,
            A_log=weights.A_log,
            dt_bias=weights.dt_bias,
            norm_weight=weights.norm_weight,
            norm_eps=weights.norm_eps,
            recurrent_state=self.prompts.layer(layer, "recurrent_state"),
            conv_state=self.prompts.layer(layer, "conv_state"),
            records_g=self.record(layer, "g"),
            records_delta=self.record(layer, "delta"),
            records_k=self.record(layer, "k"),
            records_x=self.record(layer, "x"),
            **self.index(inputs),
        )

    def step(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, inputs: StepInputs
    ) -> Tensor:
        return replay_step(
            q,
            k,
            v,
            g,
            beta,
            recurrent_state=self.prompts.layer(layer, "recurrent_state"),
            records_g=self.record(layer, "g"),
            records_delta=self.record(layer, "delta"),
            records_k=self.record(layer, "k"),
            out_dtype=torch.float32,
            **self.index(inputs),
        )

    @property
    def nbytes(self) -> int:
        names = [f"{i}.{part}" for i in self.geometry for part in TRANSITION]
        return sum(self.records.pool.tensors[name].nbytes for name in names)


class RecordsMovedBackend(ReplayBackend):
    """Replay without an index: every beam holds the records of its own past, and reordering copies them.

    A beam has a buffer of `max_depth` records in two halves, the parents' and the children's, as full states have:
    a survivor's past is copied from the half where its parent left it into its own place in the other. The inputs of
    the convolution lie and move with the records; only as many as its window reaches are copied. The kernels are
    those of `replay`.

    Args:
        dtype: the model's, of keys and convolution inputs. record_dtype: of `delta`.
        fused, round_steps: as in `ReplayBackend`.
    """

    name: BackendName = "records_moved"

    def __init__(
        self,
        layers: Sequence[LayerGeometry],
        prompts: PromptPool,
        records: Records,
        *,
        dtype: torch.dtype = torch.float32,
        record_dtype: torch.dtype = torch.float32,
        fused: bool = True,
        round_steps: bool = False,
    ) -> None:
        super().__init__(layers, prompts, records, fused=fused, round_steps=round_steps)
        self.dtype = dtype
        self.record_dtype = record_dtype
        self.max_depth = 0
        self.pool = GrowingTensors({}, prompts.device)

    def reserve(self, num_rows: int, max_depth: int) -> None:
        if max_depth > self.max_depth:
            shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
            for i, layer in self.geometry.items():
                shapes |= transition_shapes(i, layer, max_depth, self.dtype, self.record_dtype)
                shapes[f"{i}.x"] = ((max_depth, layer.conv_dim), self.dtype)
            self.pool = deepened(self.pool, shapes, self.max_depth)
            self.max_depth = max_depth
        # Rows 2r and 2r+1 are the two places of beam r, so that growing keeps every beam where it is.
        self.pool.reserve(2 * num_rows)

    def begin(self, inputs: StepInputs) -> None:
        half = inputs.row_depths % 2
        self._source = (2 * inputs.parent_rows + 1 - half).where(inputs.parent_rows >= 0, PAD).to(torch.int32)
        self._target = (2 * inputs.rows + half).where(inputs.rows >= 0, PAD).to(torch.int32)
        first = self._target * self.max_depth
        live = inputs.slots >= 0
        steps = torch.arange(inputs.ancestors.shape[1], dtype=torch.int32, device=first.device)
        past = live[:, None] & (steps < inputs.row_depths[:, None])
        self._index: RowIndex = {
            **inputs.index,
            "slots": (first + inputs.row_depths).where(live, PAD).to(torch.int32),
            "ancestors": (first[:, None] + steps).where(past, PAD).to(torch.int32),
        }

    def reorder(self, inputs: StepInputs) -> None:
        depth = inputs.ancestors.shape[1]
        if not depth:
            return
        window = max((layer.conv_kernel_size for layer in self.geometry.values()), default=1) - 1
        back = inputs.row_depths - torch.arange(
            1, min(window, depth) + 1, dtype=torch.int32, device=self._source.device
        ).unsqueeze(1)
        taken = (back >= 0) & (self._source >= 0) & (self._target >= 0)
        x_source = (self._source * self.max_depth + back).where(taken, PAD).flatten().to(torch.int32)
        x_target = (self._target * self.max_depth + back).where(taken, PAD).flatten().to(torch.int32)
        for i in self.geometry:
            for part in TRANSITION:
                rows = self.pool.tensors[f"{i}.{part}"]
                copy_rows(rows, self._target, rows, self._source, parts=inputs.row_depths)
            rows = self.record(i, "x")
            copy_rows(rows, x_target, rows, x_source)

    def record(self, layer: int, part: str) -> Tensor:
        return self.pool.tensors[f"{layer}.{part}"].flatten(0, 1)

    def index(self, inputs: StepInputs) -> RowIndex:
        return self._index

    @property
    def nbytes(self) -> int:
        return sum(self.pool.tensors[f"{i}.{part}"].nbytes for i in self.geometry for part in TRANSITION)

    @property
    def own_nbytes(self) -> int:
        return self.pool.nbytes

    @property
    def generation(self) -> tuple[int, ...]:
        return (self.pool.generation, self.max_depth)


class FullStateBackend(RecurrentBackend):
    """A state per beam in two halves of a buffer: the parents' and the children's.

    The places of a step are worked out once, by `begin`, for all layers.

    Args:
        state_dtype: dtype of the states.
        read_parent: True: a step reads the parent's state where it lies and writes the child's into the other
            half. False: the survivors' states are copied into the other half first, and the step updates them
            in place, as engines do.
        round_steps: as in `RecurrentBackend`.
    """

    name: BackendName = "full_state"

    def __init__(
        self,
        layers: Sequence[LayerGeometry],
        prompts: PromptPool,
        records: Records,
        *,
        state_dtype: torch.dtype = torch.float32,
        read_parent: bool = False,
        round_steps: bool = False,
    ) -> None:
        super().__init__(layers, prompts, records, round_steps=round_steps)
        self.read_parent = read_parent
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            str(i): ((layer.num_value_heads, layer.value_dim, layer.key_dim), state_dtype)
            for i, layer in self.geometry.items()
        }
        self.pool = GrowingTensors(shapes, prompts.device)

    def reserve(self, num_rows: int, max_depth: int) -> None:
        # Rows 2r and 2r+1 are the two places of beam r, so that growing keeps every beam where it is.
        self.pool.reserve(2 * num_rows)

    def begin(self, inputs: StepInputs) -> None:
        # Where each row's parent has left its state (PAD: the prompt), and where the row's own goes.
        half = inputs.row_depths % 2
        source = (2 * inputs.parent_rows + 1 - half).where(inputs.parent_rows >= 0, inputs.parent_rows)
        target = (2 * inputs.rows + half).where(inputs.rows >= 0, inputs.rows)
        self._source, self._target = source.to(torch.int32), target.to(torch.int32)
        self._read = self._source if self.read_parent else self._target.where(source >= 0, self._source)

    def reorder(self, inputs: StepInputs) -> None:
        if self.read_parent or not inputs.ancestors.shape[1]:
            return
        for i in self.geometry:
            states = self.pool.tensors[str(i)]
            copy_rows(states, self._target, states, self._source)

    def step(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, inputs: StepInputs
    ) -> Tensor:
        return full_state_step(
            q,
            k,
            v,
            g,
            beta,
            states=self.pool.tensors[str(layer)],
            recurrent_state=self.prompts.layer(layer, "recurrent_state"),
            read_rows=self._read,
            write_rows=self._target,
            row_prompts=inputs.row_prompts,
            out_dtype=torch.float32,
        )

    @property
    def nbytes(self) -> int:
        return self.pool.nbytes

    @property
    def own_nbytes(self) -> int:
        return self.pool.nbytes

    @property
    def generation(self) -> tuple[int, ...]:
        return (self.pool.generation,)


class ReplaySsmBackend(RecurrentBackend):
    """A buffer of transitions per beam, replayed into a state at each step from a checkpoint.

    Reordering moves the buffers. A checkpoint stays where the request's first beam has got it: its descendants know
    the place.

    Args:
        shared: True: the checkpoint is the prompt's state, one per request. False: every beam owns a copy of it.
        record_dtype: dtype of `delta` in the buffers. dtype: dtype of the keys in the buffers.
        round_steps: as in `RecurrentBackend`.
    """

    name: BackendName = "replay_ssm"

    def __init__(
        self,
        layers: Sequence[LayerGeometry],
        prompts: PromptPool,
        records: Records,
        *,
        shared: bool = False,
        dtype: torch.dtype = torch.float32,
        record_dtype: torch.dtype = torch.float32,
        round_steps: bool = False,
    ) -> None:
        super().__init__(layers, prompts, records, round_steps=round_steps)
        self.shared = shared
        self.dtype = dtype
        self.record_dtype = record_dtype
        self.max_depth = 0
        self.pool = GrowingTensors({}, prompts.device)

    def reserve(self, num_rows: int, max_depth: int) -> None:
        if max_depth > self.max_depth:
            self._deepen(max_depth)
        self.pool.reserve(num_rows)

    def begin(self, inputs: StepInputs) -> None:
        if self.shared or not inputs.some_first:
            return
        first = inputs.rows.masked_fill(inputs.row_depths > 0, -1)
        for i in self.geometry:
            states = self.prompts.layer(i, "recurrent_state")
            copy_rows(self.pool.tensors[f"{i}.checkpoint"], first, states, inputs.row_prompts)
        copy_rows(self.pool.tensors[CHECKPOINT_ROWS], first, inputs.rows, None)

    def reorder(self, inputs: StepInputs) -> None:
        if inputs.ancestors.shape[1]:
            # A row may be both read and written: through a copy of what the survivors take.
            for name, tensor in self.pool.tensors.items():
                if name.endswith(".checkpoint"):
                    continue
                parts = None if name == CHECKPOINT_ROWS else inputs.row_depths
                moved = tensor.new_empty(inputs.rows.shape[0], *tensor.shape[1:])
                copy_rows(moved, None, tensor, inputs.parent_rows, parts=parts)
                target = inputs.rows.masked_fill(inputs.parent_rows < 0, -1)
                copy_rows(tensor, target, moved, None, parts=parts)
        if self.shared:
            self._checkpoint_rows = inputs.row_prompts
        else:
            self._checkpoint_rows = gather_rows(self.pool.tensors[CHECKPOINT_ROWS], inputs.rows)

    def step(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, inputs: StepInputs
    ) -> Tensor:
        tensors = self.pool.tensors
        checkpoints = (
            self.prompts.layer(layer, "recurrent_state") if self.shared else tensors[f"{layer}.checkpoint"]
        )
        return replay_ssm_step(
            q,
            k,
            v,
            g,
            beta,
            checkpoints=checkpoints,
            checkpoint_rows=self._checkpoint_rows,
            buffer_g=tensors[f"{layer}.g"],
            buffer_delta=tensors[f"{layer}.delta"],
            buffer_k=tensors[f"{layer}.k"],
            rows=inputs.rows,
            row_depths=inputs.row_depths,
            out_dtype=torch.float32,
        )

    @property
    def nbytes(self) -> int:
        return self.pool.nbytes

    @property
    def own_nbytes(self) -> int:
        return self.pool.nbytes

    @property
    def generation(self) -> tuple[int, ...]:
        return (self.pool.generation, self.max_depth)

    def _deepen(self, max_depth: int) -> None:
        """Buffers for more steps; what the beams hold is kept."""
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if not self.shared:
            shapes[CHECKPOINT_ROWS] = ((), torch.int32)
        for i, layer in self.geometry.items():
            shapes |= transition_shapes(i, layer, max_depth, self.dtype, self.record_dtype)
            if not self.shared:
                state = (layer.num_value_heads, layer.value_dim, layer.key_dim)
                shapes[f"{i}.checkpoint"] = (state, torch.float32)
        self.pool, self.max_depth = deepened(self.pool, shapes, self.max_depth), max_depth


def transition_shapes(
    index: int,
    layer: GatedDeltaGeometry,
    max_depth: int,
    dtype: torch.dtype,
    record_dtype: torch.dtype,
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Names, shapes and dtypes of a beam's buffer of transitions in one layer."""
    return {
        f"{index}.g": ((max_depth, layer.num_value_heads), torch.float32),
        f"{index}.delta": ((max_depth, layer.num_value_heads, layer.value_dim), record_dtype),
        f"{index}.k": ((max_depth, layer.num_key_heads, layer.key_dim), dtype),
    }


def deepened(
    pool: GrowingTensors, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]], depth: int
) -> GrowingTensors:
    """Buffers for more than `depth` steps; what the beams hold is kept."""
    grown = GrowingTensors(shapes, pool.device)
    grown.generation = pool.generation
    grown.reserve(pool.capacity)
    for name, tensor in pool.tensors.items():
        old = tensor[: pool.capacity]
        if name == CHECKPOINT_ROWS or name.endswith(".checkpoint"):
            grown.tensors[name].copy_(old)
        else:
            grown.tensors[name][:, :depth] = old
    return grown


def make_backend(
    name: str,
    layers: Sequence[LayerGeometry],
    prompts: PromptPool,
    records: Records,
    *,
    dtype: torch.dtype,
    record_dtype: torch.dtype,
    full_state_mode: FullStateMode = "copy",
    replay_ssm_checkpoint: CheckpointMode = "per_beam",
    fused_layer_step: bool = True,
    round_steps: bool = False,
) -> RecurrentBackend:
    """Build a backend by name. Raises `ConfigError` for a name that is none of `BACKENDS`.

    Args:
        full_state_mode, replay_ssm_checkpoint, fused_layer_step: as in `EngineConfig`, each for its backend.
        dtype, record_dtype, round_steps: as in the backends.
    """
    if name == "replay":
        return ReplayBackend(layers, prompts, records, fused=fused_layer_step, round_steps=round_steps)
    if name == "records_moved":
        return RecordsMovedBackend(
            layers,
            prompts,
            records,
            dtype=dtype,
            record_dtype=record_dtype,
            fused=fused_layer_step,
            round_steps=round_steps,
        )
    if name == "full_state":
        return FullStateBackend(
            layers, prompts, records, read_parent=full_state_mode == "read_parent", round_steps=round_steps
        )
    if name == "replay_ssm":
        return ReplaySsmBackend(
            layers,
            prompts,
            records,
            shared=replay_ssm_checkpoint == "shared",
            dtype=dtype,
            record_dtype=record_dtype,
            round_steps=round_steps,
        )
    raise ConfigError(f"recurrent_backend: {name!r} is none of {', '.join(BACKENDS)}")
