"""Options of a beam search, whoever's numbers they are."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np

from onela import BeamParams


def test_numbers_of_numpy_are_kept_as_pythons() -> None:
    given = BeamParams(
        beam_width=np.int32(8),
        num_return_sequences=np.int64(4),
        max_tokens=np.uint8(2),
        length_penalty=np.float32(0.5),
        beam_width_array=[np.int64(6), 4],  # type: ignore[arg-type]
    )
    assert json.loads(json.dumps(asdict(given))) == {
        "beam_width": 8,
        "num_return_sequences": 4,
        "max_tokens": 2,
        "length_penalty": 0.5,
        "beam_width_array": [6, 4],
        "normalizer": "level",
    }
