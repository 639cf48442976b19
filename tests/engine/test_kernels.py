"""The engine over its kernels under Triton's interpreter: what a GPU runs, wired as there, against the references."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from onela import BeamParams, Engine, Request
from onela.decoding import beam
from onela.engine import runner
from onela.models import rounding
from onela.ops._copy_rows import copy_rows_triton
from onela.ops.attention.decode import beam_attention_triton
from onela.ops.beam_select.kernels import beam_select as beam_select_triton
from onela.ops.beams import kernels as beam_kernels
from onela.ops.gated_delta.full_state import full_state_step_triton
from onela.ops.gated_delta.gates import gated_delta_gates_triton
from onela.ops.gated_delta.layer_step import gated_delta_layer_step_triton
from onela.ops.gated_delta.replay import replay_step_triton
from onela.ops.gated_delta.replay_ssm import replay_ssm_step_triton
from onela.ops.norm.kernels import (
    gated_rms_norm_triton,
    rms_norm_triton,
    rotary_triton,
    sigmoid_gate_triton,
)
from onela.ops.norm.qk_kernel import qk_norm_rotary_triton
from onela.ops.short_conv.kernels import short_conv_step_triton
from onela.state import backend, backends
from tests.engine.helpers import (
    catalog_of,
    check_equal,
    random_prompt,
    random_sids,
    save_qwen3_5,
    vocabulary_of,
)
from tests.engine.test_engine import BACKENDS, name_of

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/engine/test_gpu.py runs them as they are"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]

SIZES = (6, 8, 7)
VOCABULARY = vocabulary_of(*SIZES)
CATALOG = catalog_of(random_sids(120, SIZES), VOCABULARY)
REQUESTS = [
    Request(prompt_token_ids=random_prompt(length, seed=length), params=BeamParams(beam_width_array=widths))
    for length, widths in [(3, (2, 5, 8)), (20, (1, 3, 3))]
]


def copy_rows(
    target: torch.Tensor, target_rows: Any, source: torch.Tensor, source_rows: Any, *, parts: Any = None
) -> None:
    copy_rows_triton(target, target_rows, source, source_rows, parts)


BETWEEN_PRODUCTS: dict[str, Any] = {
    "rms_norm": rms_norm_triton,
    "qk_norm_rotary": qk_norm_rotary_triton,
    "sigmoid_gate": sigmoid_gate_triton,
    "gated_rms_norm": gated_rms_norm_triton,
    "rotary": rotary_triton,
    "beam_attention": beam_attention_triton,
}
KERNELS: list[tuple[Any, str, Any]] = [
    (backend, "gated_rms_norm", gated_rms_norm_triton),
    (backend, "gated_delta_gates", gated_delta_gates_triton),
    (backends, "gated_delta_layer_step", gated_delta_layer_step_triton),
    (backend, "short_conv_step", short_conv_step_triton),
    (backends, "full_state_step", full_state_step_triton),
    (backends, "replay_step", replay_step_triton),
    (backends, "replay_ssm_step", replay_ssm_step_triton),
    (backends, "copy_rows", copy_rows),
    (beam, "beam_select", beam_select_triton),
    (beam, "pack_beams", beam_kernels.pack_beams),
    (beam, "advance_beams", beam_kernels.advance_beams),
    (runner, "pack_step", beam_kernels.pack_step),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Head sizes that the kernels take."""
    path = tmp_path_factory.mktemp("qwen3_5")
    types = ["linear_attention", "full_attention"]
    save_qwen3_5(path, gain=1.0, linear_value_head_dim=32, num_hidden_layers=2, layer_types=types)
    return path


def engine_of(path: Path, **options: Any) -> Engine:
    return Engine.from_pretrained(path, vocabulary=VOCABULARY, catalog=CATALOG, device="cpu", **options)


@pytest.mark.parametrize("options", BACKENDS, ids=name_of)
def test_the_engine_over_kernels_equals_the_references(
    path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = engine_of(path).generate(REQUESTS)
    monkeypatch.setattr(rounding.Rounded, "rounding", replace(rounding.LEAST, **BETWEEN_PRODUCTS))
    for module, name, kernel in KERNELS:
        assert hasattr(module, name)
        monkeypatch.setattr(module, name, kernel)
    for result, wanted in zip(engine_of(path, **options).generate(REQUESTS), expected):
        check_equal(result.items, [(item.sid, item.cum_logprob) for item in wanted.items], 1e-3)
