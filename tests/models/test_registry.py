"""Which class runs which model, and in which dtype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from onela.errors import CheckpointError, ConfigError
from onela.models import FAMILIES, load_model
from onela.models.registry import resolve_dtype
from tests.checkpoints import save_qwen3

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("model_type", ["llama", "qwen2", None, 3])
def test_an_unknown_model_type_lists_the_known(tmp_path: Path, model_type: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ConfigError) as caught:
        load_model(tmp_path)
    message = str(caught.value)
    assert repr(model_type) in message
    known = ("qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
    assert set(FAMILIES) == set(known)
    assert ", ".join(known) in message


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such directory"):
        load_model(tmp_path / "nowhere")


def test_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        load_model(tmp_path)


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    values = {"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="quantization_config is not supported"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("dtype", "values", "device", "expected"),
    [
        ("auto", {}, CPU, torch.float32),
        ("auto", {"dtype": "bfloat16"}, CPU, torch.bfloat16),
        ("auto", {"torch_dtype": "bfloat16"}, CPU, torch.bfloat16),
        ("auto", {"dtype": "float16"}, CPU, torch.float32),
        ("auto", {"dtype": "float32", "text_config": {"dtype": "bfloat16"}}, CPU, torch.bfloat16),
        ("auto", {"dtype": "float32"}, CUDA, torch.bfloat16),
        ("float32", {"dtype": "bfloat16"}, CUDA, torch.float32),
        ("bfloat16", {}, CPU, torch.bfloat16),
    ],
)
def test_dtype(dtype: str, values: dict[str, Any], device: torch.device, expected: torch.dtype) -> None:
    assert resolve_dtype(dtype, values, device) == expected


def test_an_unknown_dtype() -> None:
    with pytest.raises(ConfigError, match="dtype: 'fp8' is none of auto, float32, bfloat16"):
        resolve_dtype("fp8", {}, CPU)


def test_float16_becomes_float32(tmp_path: Path) -> None:
    reference = save_qwen3(tmp_path, dtype=torch.float16)
    model = load_model(tmp_path)
    assert model.lm_head.weight.dtype == torch.float32
    assert torch.equal(model.lm_head.weight, reference.lm_head.weight.float())


def test_weights_ask_for_no_gradient(tmp_path: Path) -> None:
    save_qwen3(tmp_path)
    model = load_model(tmp_path)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
