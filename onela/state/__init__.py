"""What is held for prompts and beams: prompt states, records, and the backends over them."""

from __future__ import annotations

from dataclasses import dataclass

from onela.state.backend import BACKENDS, REPLAYING, BackendName, GatedDeltaWeights, RecurrentBackend
from onela.state.backends import make_backend
from onela.state.choice import choose_backend
from onela.state.geometry import AttentionGeometry, GatedDeltaGeometry, LayerGeometry
from onela.state.inputs import PrefillInputs, StepInputs
from onela.state.prompt import PromptPool, PromptState
from onela.state.records import Records


@dataclass(frozen=True)
class DecodeState:
    """Everything a model reads and writes beside its weights.

    Attributes:
        prompts: what prefill left, per prompt. records: append-only rows, per beam and step.
        backend: how the beams' recurrent states are held.
    """

    prompts: PromptPool
    records: Records
    backend: RecurrentBackend

    @property
    def generation(self) -> tuple[tuple[int, ...], ...]:
        """Changes whenever any tensor of the state is replaced: pointers taken before are then worthless."""
        return self.prompts.generation, (self.records.pool.generation,), self.backend.generation

    @property
    def nbytes(self) -> int:
        """Bytes allocated: for prompts, records and what the backend holds beside them."""
        return self.prompts.nbytes + self.records.nbytes + self.backend.own_nbytes


__all__ = [
    "BACKENDS",
    "REPLAYING",
    "AttentionGeometry",
    "BackendName",
    "DecodeState",
    "GatedDeltaGeometry",
    "GatedDeltaWeights",
    "LayerGeometry",
    "PrefillInputs",
    "PromptPool",
    "PromptState",
    "Records",
    "RecurrentBackend",
    "StepInputs",
    "choose_backend",
    "make_backend",
]
