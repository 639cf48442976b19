"""Options of a beam search, whoever's numbers they are."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from onela import BeamParams, RequestError


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
    assert BeamParams(beam_width_array=np.array([6, 4])).beam_width_array == (6, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["beam_width", "num_return_sequences", "max_tokens"])
@pytest.mark.parametrize("value", [True, np.True_])
def test_a_boolean_is_no_count(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{field}: a whole number of at least 1 is expected"):
        BeamParams(**{field: value})


@pytest.mark.parametrize("widths", [[True, 2], np.array([True, True]), {4, 2}, {4: 2}, "42", 4])
def test_what_is_no_list_of_widths(widths: Any) -> None:
    with pytest.raises(
        RequestError, match=r"^beam_width_array: a (list of widths|whole number of at least 1) is"
    ):
        BeamParams(beam_width_array=widths)
