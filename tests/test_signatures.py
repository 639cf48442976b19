"""An op, its kernel and its reference have one signature."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest

PAIRS = [
    ("onela.ops.gated_delta", "replay_step"),
    ("onela.ops.gated_delta", "full_state_step"),
    ("onela.ops.gated_delta", "replay_ssm_step"),
    ("onela.ops.gated_delta", "gated_delta_layer_step"),
    ("onela.ops.gated_delta", "gated_delta_layer_prefill"),
    ("onela.ops.attention", "prefill_attention"),
    ("onela.ops.attention", "beam_attention"),
    ("onela.ops.beam_select", "beam_select"),
    ("onela.ops.beams", "pack_step"),
    ("onela.ops.beams", "pack_beams"),
    ("onela.ops.beams", "advance_beams"),
    ("onela.ops.short_conv", "short_conv_step"),
    ("onela.ops.norm", "rms_norm"),
    ("onela.ops.norm", "gated_rms_norm"),
    ("onela.ops.norm", "rotary_angles"),
    ("onela.ops.norm", "rotary"),
    ("onela.ops.norm", "qk_norm_rotary"),
    ("onela.ops.norm", "sigmoid_gate"),
    ("onela.ops.norm", "swiglu"),
    ("onela.ops.linear", "normed_linear"),
    ("onela.ops.linear", "added_linear"),
    ("onela.ops.linear", "heads_linear"),
    ("onela.ops.linear", "quantize_rows"),
    ("onela.ops.linear", "float8_linear"),
    ("onela.ops.linear", "linear_swiglu"),
    ("onela.ops.linear", "rms_norm_float8"),
    ("onela.ops.linear", "swiglu_float8"),
]


def shape_of(function: object) -> list[tuple[str, object, object]]:
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters), "no **kwargs in an op"
    return [(p.name, p.kind, p.default) for p in parameters]


@pytest.mark.parametrize(("module", "name"), PAIRS)
def test_op_and_reference_have_one_signature(module: str, name: str) -> None:
    package = import_module(module)
    assert shape_of(getattr(package, name)) == shape_of(getattr(package, f"{name}_ref"))
    assert name in package.__all__
    assert f"{name}_ref" in package.__all__
