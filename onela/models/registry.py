"""Which class runs which `model_type`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from onela.config import check_choice, check_rounding
from onela.errors import CheckpointError, ConfigError
from onela.models.causal_lm import CausalLM
from onela.models.config import ModelConfig, read_json
from onela.models.qwen3 import Qwen3
from onela.models.qwen3_5 import Qwen3_5
from onela.models.qwen3_5_moe import Qwen3_5Moe
from onela.models.qwen3_next import Qwen3Next
from onela.models.weights import load_weights

FAMILIES: dict[str, type[CausalLM]] = {
    "qwen3": Qwen3,
    "qwen3_5": Qwen3_5,
    "qwen3_5_moe": Qwen3_5Moe,
    "qwen3_5_moe_text": Qwen3_5Moe,
    "qwen3_5_text": Qwen3_5,
    "qwen3_next": Qwen3Next,
}

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def read_model_config(path: str | Path) -> ModelConfig:
    """Read the sizes of a checkpoint without its weights. Raises as `load_model`."""
    return _family(Path(path))[2]


def read_family(path: str | Path) -> tuple[type[CausalLM], ModelConfig]:
    """The class and the sizes of a checkpoint. Raises as `load_model`."""
    family, _, config = _family(Path(path))
    return family, config


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    quantization: str = "none",
    rounding: str = "least",
) -> CausalLM:
    """Load a checkpoint directory.

    Args:
        path: a directory with `config.json` and `*.safetensors`.
        dtype: "float32", "bfloat16", or "auto": bfloat16 on a GPU, on a CPU what `config.json` says (float16
            becomes float32).
        device: where the weights go.
        quantization: "none", or "fp8": the linear maps of mixers and MLPs in float8 (`CausalLM.quantize`).
        rounding: "least", or "transformers": where a 16-bit model rounds (`onela.models.rounding`).
    Raises:
        CheckpointError: the directory or a file is missing or unreadable, or a tensor does not fit.
        ConfigError: a field of `config.json` or an argument has a value that is not supported.
    """
    directory = Path(path)
    family, values, config = _family(directory)
    device = torch.device(device)
    check_choice("quantization", quantization)
    check_choice("rounding", rounding)
    check_rounding(rounding, quantization)
    dtype_found = resolve_dtype(dtype, values, device)
    model = load_weights(family, config, directory, dtype=dtype_found, device=device, rounding=rounding)
    if quantization == "fp8":
        model.quantize()
    return model


def _family(directory: Path) -> tuple[type[CausalLM], dict[str, Any], ModelConfig]:
    """The class of a checkpoint, its parsed `config.json`, and its sizes."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory")
    values = read_json(directory / "config.json")
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(f"config.json: model_type {model_type!r} is none of {', '.join(sorted(FAMILIES))}")
    if values.get("quantization_config") is not None:
        raise ConfigError("config.json: quantization_config is not supported, only float weights")
    family = FAMILIES[model_type]
    return family, values, family.read_config(values)


def resolve_dtype(dtype: str, values: dict[str, object], device: torch.device) -> torch.dtype:
    """The dtype that weights are kept in. Raises `ConfigError` for an unknown name."""
    if dtype == "auto":
        if device.type == "cuda":
            return torch.bfloat16
        inner = values.get("text_config")
        source = inner if isinstance(inner, dict) else values
        stored = source.get("dtype", source.get("torch_dtype", "float32"))
        return torch.bfloat16 if stored == "bfloat16" else torch.float32
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: {dtype!r} is none of auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]
