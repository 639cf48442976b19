"""Loading a Hugging Face directory: one or many `*.safetensors`, every tensor accounted for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from onela.errors import CheckpointError
from onela.models.causal_lm import CausalLM
from onela.models.config import ModelConfig, read_json

# Kept in fp32 whatever the model's dtype: they sit in an exponent, and cost nothing.
FP32_SUFFIXES = (".A_log", ".dt_bias")


def tensor_files(directory: Path) -> list[Path]:
    """The weight files of a checkpoint. Raises `CheckpointError` when one is missing."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: no weight_map")
        files = [directory / name for name in sorted(set(weight_map.values()))]
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory}: no *.safetensors and no model.safetensors.index.json")
    for file in files:
        if not file.exists():
            raise CheckpointError(f"{file}: named by {index.name}, but not there")
    return files


def read_tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the files, one at a time."""
    for file in files:
        try:
            with safe_open(file, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118 - not a dict
                    yield name, reader.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: not readable as safetensors ({error})") from None


def load_weights(
    model_class: type[CausalLM],
    config: ModelConfig,
    directory: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> CausalLM:
    """Build a model and fill it from a directory.

    Raises:
        CheckpointError: a tensor is missing, unused, given twice, or has the wrong shape; all offenders are named.
    """
    with torch.device("meta"):
        model = model_class(config)
    expected = dict(model.state_dict())
    tied = config.tie_word_embeddings
    loaded: dict[str, Tensor] = {}
    problems: list[str] = []
    given: set[str] = set()
    for name, tensor in read_tensors(tensor_files(directory)):
        target = model_class.rename(name)
        if target is None:
            continue
        if target not in expected:
            problems.append(f"{name}: not used by a {config.model_type} model of this configuration")
            continue
        if target in given:
            problems.append(f"{name}: given twice")
        elif tuple(tensor.shape) != tuple(expected[target].shape):
            problems.append(f"{name}: shape {list(tensor.shape)}, expected {list(expected[target].shape)}")
        elif not tensor.is_floating_point():
            problems.append(f"{name}: dtype {tensor.dtype}, expected a floating-point one")
        else:
            wanted = torch.float32 if target.endswith(FP32_SUFFIXES) else dtype
            loaded[target] = tensor.to(device=device, dtype=wanted)
        given.add(target)
    if tied:
        _tie(loaded, problems)
    if tied and "model.embed_tokens.weight" in given:
        given.add("lm_head.weight")
    problems += [f"{name}: missing" for name in expected if name not in given]
    if problems:
        shown = "\n  ".join(problems[:20]) + (
            f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        )
        raise CheckpointError(f"{directory}: {len(problems)} tensors do not fit\n  {shown}")
    model.load_state_dict(loaded, assign=True)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.requires_grad_(False)
    model.fuse()
    return model.eval()


def _tie(loaded: dict[str, Tensor], problems: list[str]) -> None:
    """A tied head is the embedding; a file that stores both must store the same."""
    embedding = loaded.get("model.embed_tokens.weight")
    head = loaded.get("lm_head.weight")
    if embedding is None:
        return
    if head is not None and not torch.equal(head, embedding):
        problems.append(
            "lm_head.weight: differs from model.embed_tokens.weight, but tie_word_embeddings is true"
        )
    loaded["lm_head.weight"] = embedding
