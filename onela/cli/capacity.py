"""`onela capacity`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from onela.cli.common import JsonOption, QuantizationOption, format_bytes, print_json, print_table
from onela.config import MAX_BEAM_WIDTH, EngineConfig, check_choice
from onela.decoding.params import MAX_TOKENS
from onela.errors import ConfigError
from onela.models import read_model_config
from onela.models.footprint import row_bytes, weight_bytes
from onela.state.capacity import (
    ARMS,
    Capacity,
    Fit,
    RequestSize,
    ServedModel,
    Workload,
    max_requests,
    own_capacity,
    published_capacity,
    spare_slots,
)
from onela.state.geometry import GatedDeltaGeometry, LayerGeometry

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def capacity(
    model: Annotated[
        Path | None, typer.Argument(help="Checkpoint directory; default: one layer of the sizes below.")
    ] = None,
    num_requests: Annotated[int, typer.Option("--requests", "-R", min=1, help="Requests at a time.")] = 4,
    beam_width: Annotated[
        int, typer.Option("--beam-width", "-W", min=1, max=MAX_BEAM_WIDTH, help="Beams per request.")
    ] = 512,
    tokens: Annotated[
        list[int] | None,
        typer.Option(
            "--tokens",
            "-O",
            min=2,
            max=MAX_TOKENS,
            help="Tokens of a SID; may be repeated; default: 3 and 7.",
        ),
    ] = None,
    key_heads: Annotated[int, typer.Option(min=1, help="H, without a model.")] = 16,
    value_heads: Annotated[int, typer.Option(min=1, help="HV, without a model.")] = 16,
    key_dim: Annotated[int, typer.Option(min=1, help="K, without a model.")] = 128,
    value_dim: Annotated[int, typer.Option(min=1, help="V, without a model.")] = 128,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Say how many requests fit into this, e.g. 139GiB, or gpu; default with a model: a GPU's own."
        ),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option("--prompt", min=1, help="Tokens of a prompt.")] = 1024,
    codebook_size: Annotated[int, typer.Option("--codebook", min=1, help="Codes of a level.")] = 8192,
    dtype: Annotated[str, typer.Option(help="Of weights and records: bfloat16 or float32.")] = "bfloat16",
    quantization: QuantizationOption = None,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens per KV page.")] = EngineConfig.page_size,
    json_output: JsonOption = False,
) -> None:
    """Print what each backend holds and writes per step, by formula, and how many requests fit into a memory."""
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype: {dtype!r} is none of {', '.join(DTYPES)}")
    if quantization is None:
        quantization = EngineConfig.quantization
    check_choice("quantization", quantization, written="--quantization")
    if memory is not None and model is None:
        raise ConfigError("--memory: needs a checkpoint directory, for its weights and all its layers")
    room = read_memory(memory) if model is not None else None
    layers: tuple[LayerGeometry, ...]
    if model is not None:
        layers = read_model_config(model).geometry
    else:
        if value_heads % key_heads:
            raise ConfigError(f"--value-heads: {value_heads} is no multiple of --key-heads = {key_heads}")
        layers = (GatedDeltaGeometry(key_heads, value_heads, key_dim, value_dim),)
    report: list[dict[str, Any]] = []
    for length in tokens or [3, 7]:
        workload = Workload(num_requests, beam_width, length - 1)
        published = published_capacity(layers, workload)
        baseline = published[-1]
        accountings = (
            (
                "published accounting: fp32 records, prompt state twice, an index per record and head",
                published,
            ),
            (
                "own default: bf16 delta, bf16 key as it came, prompt state once",
                own_capacity(layers, workload),
            ),
        )
        for name, arms in accountings:
            report += [_line(length, name, arm, baseline) for arm in arms]
            if not json_output:
                title = f"R={num_requests} W={beam_width} O={length}; {name}"
                print_table(title, COLUMNS, [_row(arm, baseline) for arm in arms])
        if model is not None and room is not None:
            kind = DTYPES[dtype]
            served = ServedModel(
                layers,
                weight_bytes=weight_bytes(
                    model, kind, num_head_rows=length * codebook_size, quantization=quantization
                ),
                row_bytes=row_bytes(read_model_config(model), kind),
                num_codes=codebook_size,
                dtype=kind,
                record_dtype=kind,
                page_size=page_size,
            )
            request = RequestSize(prompt_tokens, possible_widths(beam_width, codebook_size, length))
            fits = [max_requests(served, arm, request, room) for arm in ARMS]
            report += [_fit_line(fit, length, room, served, request) for fit in fits]
            if not json_output:
                title = f"fit into {format_bytes(room)}: W={beam_width} O={length}, prompt {prompt_tokens}"
                print_table(title, FIT_COLUMNS, [_fit_row(fit) for fit in fits])
    if json_output:
        print_json(report)


def read_memory(text: str | None) -> int | None:
    """Bytes of `139GiB` and the like (units are binary), of `gpu`, or by default of the GPU if there is one.

    Raises:
        ConfigError: the text is no size, or there is no GPU to ask.
    """
    if text is None or text.lower() == "gpu":
        if torch.cuda.is_available():
            return torch.cuda.mem_get_info()[1]
        if text is None:
            return None
        raise ConfigError(
            "--memory: gpu was asked for, and torch sees no GPU here; give a size such as 139GiB"
        )
    found = SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"--memory: a size such as 139GiB, or gpu, is expected, got {text!r}")
    return int(float(found[1]) * UNITS[found[2].upper()])


def possible_widths(beam_width: int, codebook_size: int, num_levels: int) -> tuple[int, ...]:
    """Beams after each token; the first tokens may have fewer codes than there could be beams."""
    return tuple(min(beam_width, codebook_size ** (level + 1)) for level in range(num_levels))


FIT_COLUMNS = ["backend", "requests", "each", "prompts", "beams", "the rest"]
PROMPT_PARTS = ("kv_pages", "recurrent_states", "conv_states", "page_table")
BEAM_PARTS = ("records", "beam_states")
OTHER_PARTS = ("weights", "activations", "logits", "runtime")


def _fit_row(fit: Fit) -> list[str]:
    sums = [
        format_bytes(sum(fit.parts[name] for name in names))
        for names in (PROMPT_PARTS, BEAM_PARTS, OTHER_PARTS)
    ]
    return [fit.arm, str(fit.num_requests), format_bytes(fit.request_bytes), *sums]


def _fit_line(fit: Fit, length: int, room: int, served: ServedModel, request: RequestSize) -> dict[str, Any]:
    pages = -(-request.prompt_tokens // served.page_size)
    return {
        "tokens": length,
        "accounting": "requests that fit",
        "backend": fit.arm,
        "memory_bytes": room,
        "num_requests": fit.num_requests,
        "request_bytes": fit.request_bytes,
        "parts": fit.parts,
        "limits": {
            "max_prompts": fit.num_requests,
            "max_slots": fit.num_requests * request.num_slots
            + spare_slots(served, request, fit.num_requests),
            "max_pages": fit.num_requests * pages if fit.parts["kv_pages"] else None,
        },
    }


COLUMNS = [
    "backend",
    "persistent",
    "less than full_state",
    "written per step",
    "fewer writes than full_state",
]


def _row(arm: Capacity, baseline: Capacity) -> list[str]:
    return [
        arm.arm,
        format_bytes(arm.persistent),
        f"{baseline.persistent / max(arm.persistent, 1):.1f}x",
        format_bytes(arm.written_per_step),
        f"{baseline.written_per_step / max(arm.written_per_step, 1):.1f}x",
    ]


def _line(length: int, accounting: str, arm: Capacity, baseline: Capacity) -> dict[str, object]:
    return {
        "tokens": length,
        "accounting": accounting.split(":", 1)[0],
        "backend": arm.arm,
        "persistent_bytes": arm.persistent,
        "written_bytes_per_step": arm.written_per_step,
        "persistent_ratio": baseline.persistent / max(arm.persistent, 1),
        "written_ratio": baseline.written_per_step / max(arm.written_per_step, 1),
    }
