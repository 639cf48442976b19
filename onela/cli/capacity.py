"""`onela capacity`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onela.cli.common import JsonOption, format_bytes, print_json, print_table
from onela.errors import ConfigError
from onela.models import read_model_config
from onela.state.capacity import Capacity, Workload, own_capacity, published_capacity
from onela.state.geometry import GatedDeltaGeometry, LayerGeometry


def capacity(
    model: Annotated[
        Path | None, typer.Argument(help="Checkpoint directory; default: one layer of the sizes below.")
    ] = None,
    num_requests: Annotated[int, typer.Option("--requests", "-R", min=1, help="Requests at a time.")] = 4,
    beam_width: Annotated[int, typer.Option("--beam-width", "-W", min=1, help="Beams per request.")] = 512,
    tokens: Annotated[
        list[int] | None, typer.Option("--tokens", "-O", min=2, help="Tokens of a SID; may be repeated.")
    ] = None,
    key_heads: Annotated[int, typer.Option(min=1, help="H, without a model.")] = 16,
    value_heads: Annotated[int, typer.Option(min=1, help="HV, without a model.")] = 16,
    key_dim: Annotated[int, typer.Option(min=1, help="K, without a model.")] = 128,
    value_dim: Annotated[int, typer.Option(min=1, help="V, without a model.")] = 128,
    json_output: JsonOption = False,
) -> None:
    """Print what each backend holds and writes per step, by formula."""
    layers: tuple[LayerGeometry, ...]
    if model is not None:
        layers = read_model_config(model).geometry
    else:
        if value_heads % key_heads:
            raise ConfigError(f"--value-heads: {value_heads} is no multiple of --key-heads = {key_heads}")
        layers = (GatedDeltaGeometry(key_heads, value_heads, key_dim, value_dim),)
    report = []
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
    if json_output:
        print_json(report)


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
