"""Gated DeltaNet: prefill of prompts and one decode step of wide beams."""

from onela.ops.gated_delta.dispatch import (
    full_state_step,
    gated_delta_gates,
    gated_delta_layer_prefill,
    gated_delta_layer_step,
    replay_ssm_step,
    replay_step,
)
from onela.ops.gated_delta.layer_prefill_reference import gated_delta_layer_prefill_ref
from onela.ops.gated_delta.layer_step_reference import gated_delta_layer_step_ref
from onela.ops.gated_delta.prefill import gated_delta_prefill
from onela.ops.gated_delta.reference import (
    full_state_step_ref,
    gated_delta_recurrent_ref,
    merge_state,
    replay_ssm_step_ref,
    replay_step_ref,
    split_state,
)

__all__ = [
    "full_state_step",
    "full_state_step_ref",
    "gated_delta_gates",
    "gated_delta_layer_prefill",
    "gated_delta_layer_prefill_ref",
    "gated_delta_layer_step",
    "gated_delta_layer_step_ref",
    "gated_delta_prefill",
    "gated_delta_recurrent_ref",
    "merge_state",
    "replay_ssm_step",
    "replay_ssm_step_ref",
    "replay_step",
    "replay_step_ref",
    "split_state",
]
