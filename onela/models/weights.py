"""Loading a Hugging Face directory: one or many `*.safetensors`, every tensor accounted for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from onela.errors import CheckpointError
from onela.models.causal_lm import CausalLM
from onela.models.config import ModelConfig, read_json

# Kept in fp32 whatever the model's dtype: they sit in an exponent, and cost nothing.
FP32_SUFFIXES = (".A_log", ".dt_bias")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MAX_SHOWN = 20


def tensor_files(directory: Path) -> list[Path]:
    """The weight files of a checkpoint. Raises `CheckpointError` when one is missing."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if (
            not isinstance(weight_map, dict)
            or not weight_map
            or not all(isinstance(name, str) for name in weight_map.values())
        ):
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


class Assembly:
    """Parameters on their way from the files into the model: what has come, and what does not fit.

    Args:
        expected: every parameter, for its shape.
        pieces: parameters that may come in pieces, and the pieces' names in order (see `CausalLM.pieces`).
        dtype, device: of the result.

    Attributes:
        loaded: parameters so far, whole or in part. problems: one line for each tensor that does not fit.
    """

    def __init__(
        self,
        expected: Mapping[str, Tensor],
        pieces: Mapping[str, Sequence[str]],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.expected = expected
        self.pieces = pieces
        self.dtype = dtype
        self.device = device
        self.loaded: dict[str, Tensor] = {}
        self.problems: list[str] = []
        self.given: set[str] = set()
        self._piece_of = {
            piece: (parameter, place)
            for parameter, names in pieces.items()
            for place, piece in enumerate(names)
        }

    def add(self, name: str, target: str, tensor: Tensor) -> bool:
        """Take one tensor of a file. False: no parameter, nor a piece of one, has that name.

        Args:
            name: what the file calls it, for messages. target: its name after `CausalLM.rename`.
        """
        parameter, place = self._piece_of.get(target, (target, None))
        if parameter not in self.expected:
            return False
        shape = list(self.expected[parameter].shape)
        if place is not None:
            shape = [self._piece_rows(parameter), shape[-1]]
        if target in self.given or (place is not None and parameter in self.given):
            self.problems.append(f"{name}: given twice")
        elif list(tensor.shape) != shape:
            self.problems.append(f"{name}: shape {list(tensor.shape)}, expected {shape}")
        elif not tensor.is_floating_point():
            self.problems.append(f"{name}: dtype {tensor.dtype}, expected a floating-point one")
        elif place is None:
            if parameter in self.loaded:
                self.problems.append(f"{name}: given twice, also in pieces")
            self.loaded[parameter] = tensor.to(device=self.device, dtype=self._dtype(parameter))
        else:
            self._fill(parameter, place, tensor)
        self.given.add(target)
        return True

    def missing(self) -> Iterator[str]:
        """Names of what has not come: parameters, or the pieces of one that has come in part."""
        for parameter in self.expected:
            if parameter in self.given:
                continue
            lacking = [piece for piece in self.pieces.get(parameter, ()) if piece not in self.given]
            if parameter not in self.pieces or len(lacking) == len(self.pieces[parameter]):
                yield parameter
            else:
                yield from lacking

    def _fill(self, parameter: str, place: int, tensor: Tensor) -> None:
        if parameter not in self.loaded:
            self.loaded[parameter] = torch.empty(
                self.expected[parameter].shape, dtype=self._dtype(parameter), device=self.device
            )
        size = self._piece_rows(parameter)
        self.loaded[parameter].flatten(0, -2)[place * size : (place + 1) * size] = tensor

    def _piece_rows(self, parameter: str) -> int:
        shape = self.expected[parameter].shape
        return shape.numel() // shape[-1] // len(self.pieces[parameter])

    def _dtype(self, parameter: str) -> torch.dtype:
        return torch.float32 if parameter.endswith(FP32_SUFFIXES) else self.dtype


def load_weights(
    model_class: type[CausalLM],
    config: ModelConfig,
    directory: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    rounding: str = "least",
) -> CausalLM:
    """Build a model and fill it from a directory; `rounding` as in `load_model`.

    Raises:
        CheckpointError: a tensor is missing, unused, given twice, or has the wrong shape; all offenders are named.
    """
    with torch.device("meta"):
        model = model_class(config)
    assembly = Assembly(dict(model.state_dict()), model_class.pieces(config), dtype=dtype, device=device)
    problems = assembly.problems
    for name, tensor in read_tensors(tensor_files(directory)):
        target = model_class.rename(name)
        if target is not None and not assembly.add(name, target, tensor):
            problems.append(f"{name}: not used by a {config.model_type} model of this configuration")
    if config.tie_word_embeddings:
        _tie(assembly)
    problems += [f"{name}: missing" for name in assembly.missing()]
    if problems:
        shown = "\n  ".join(problems[:MAX_SHOWN])
        if len(problems) > MAX_SHOWN:
            shown += f"\n  and {len(problems) - MAX_SHOWN} more"
        raise CheckpointError(f"{directory}: {len(problems)} tensors do not fit\n  {shown}")
    model.load_state_dict(assembly.loaded, assign=True)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.requires_grad_(False)
    model.round_as(rounding)
    if model.rounding.least:
        model.fuse()
    return model.eval()


def _tie(assembly: Assembly) -> None:
    """A tied head is the embedding; a file that stores both must store the same."""
    if EMBEDDING in assembly.given:
        assembly.given.add(HEAD)
    embedding, head = assembly.loaded.get(EMBEDDING), assembly.loaded.get(HEAD)
    if embedding is None:
        return
    if head is not None and not torch.equal(head, embedding):
        assembly.problems.append(f"{HEAD}: differs from {EMBEDDING}, but tie_word_embeddings is true")
    assembly.loaded[HEAD] = embedding
