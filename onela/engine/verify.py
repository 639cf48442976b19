"""Runs every backend on the same checkpoint and requests, and says how far they are apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onela.decoding import BeamParams
from onela.engine.engine import Engine
from onela.engine.request import Request, Result

VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("replay", {"recurrent_backend": "replay"}),
    ("full_state_copy", {"recurrent_backend": "full_state", "full_state_mode": "copy"}),
    ("full_state_read_parent", {"recurrent_backend": "full_state", "full_state_mode": "read_parent"}),
    ("replay_ssm", {"recurrent_backend": "replay_ssm", "replay_ssm_checkpoint": "per_beam"}),
    ("replay_ssm_shared", {"recurrent_backend": "replay_ssm", "replay_ssm_checkpoint": "shared"}),
    ("replay_unfused", {"recurrent_backend": "replay", "fused_layer_step": False}),
    ("records_moved", {"recurrent_backend": "records_moved"}),
)


@dataclass(frozen=True)
class BackendDifference:
    """How one backend's answers differ from the first one's.

    Attributes:
        backend: which. same_items: share of requests whose lists are equal, in order.
        overlap: mean share of common SIDs. max_score_difference: largest difference over the common SIDs.
        state_bytes: what the backend held for the beams' recurrent states.
    """

    backend: str
    same_items: float
    overlap: float
    max_score_difference: float
    state_bytes: int

    def within(self, tolerance: float) -> bool:
        """Whether there were scores to compare, and none of them is further off than `tolerance`."""
        return self.overlap > 0 and self.max_score_difference <= tolerance


def verify_backends(
    engine: Engine, requests: Sequence[Request], params: BeamParams
) -> list[BackendDifference]:
    """Answer `requests` with every backend over the engine's model, catalogue and options.

    Returns:
        One line per backend; the first compares `full_state_copy`, the definition, with itself.
    """
    runs: dict[str, tuple[list[Result], int]] = {}
    for name, options in VARIANTS:
        config = dataclasses.replace(engine.config, **options)
        variant = Engine(
            engine.model,
            engine.vocabulary,
            engine.catalog,
            config=config,
            tokenizer=engine.tokenizer,
            prompt_options=engine.prompt_encoder.options,
        )
        runs[name] = (variant.generate(requests, params), variant.state.backend.nbytes)
    expected = runs["full_state_copy"][0]
    return [_difference(name, expected, results, nbytes) for name, (results, nbytes) in runs.items()]


def _difference(
    name: str, expected: Sequence[Result], results: Sequence[Result], nbytes: int
) -> BackendDifference:
    same, overlap, largest = 0, 0.0, 0.0
    for left, right in zip(expected, results):
        scores = {item.sid: item.cum_logprob for item in left.items}
        common = [item for item in right.items if item.sid in scores]
        same += [item.sid for item in left.items] == [item.sid for item in right.items]
        overlap += len(common) / max(len(scores), 1)
        largest = max([largest, *(abs(item.cum_logprob - scores[item.sid]) for item in common)])
    count = max(len(expected), 1)
    return BackendDifference(name, same / count, overlap / count, largest, nbytes)
