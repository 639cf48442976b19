"""`onela verify`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import torch
import typer

from onela.cli.common import (
    CatalogOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelPath,
    PatternOption,
    QuantizationOption,
    VocabularyOption,
    format_bytes,
    load_engine,
    print_json,
    print_table,
)
from onela.decoding import BeamParams
from onela.engine import Request
from onela.engine.verify import verify_backends

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.25}


def verify(
    model: ModelPath,
    catalog: CatalogOption = None,
    vocabulary: VocabularyOption = None,
    sid_pattern: PatternOption = None,
    num_requests: Annotated[int, typer.Option("--requests", min=1, help="Random prompts to run.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the longest prompt.")] = 128,
    beam_width: Annotated[int, typer.Option(min=1, help="Beams per request.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    quantization: QuantizationOption = None,
    json_output: JsonOption = False,
) -> None:
    """Run all backends on a checkpoint and print the largest difference; exit code 1 above the tolerance.

    A backend that has no SID in common with the others is above every tolerance.
    """
    engine = load_engine(
        model,
        catalog,
        vocabulary,
        sid_pattern=sid_pattern,
        device=device,
        dtype=dtype,
        quantization=quantization,
    )
    generator = torch.Generator().manual_seed(seed)
    size = engine.model.config.vocab_size
    requests = []
    for i in range(num_requests):
        # Lengths fall off, so that the batch is uneven.
        length = max(1, prompt_tokens >> i)
        requests.append(
            Request(prompt_token_ids=torch.randint(0, size, (length,), generator=generator).tolist())
        )
    differences = verify_backends(engine, requests, BeamParams(beam_width=beam_width))
    tolerance = TOLERANCE[engine.model.lm_head.weight.dtype]
    worst = max(line.max_score_difference for line in differences)
    if json_output:
        lines = [dataclasses.asdict(line) for line in differences]
        print_json({"backends": lines, "max_score_difference": worst, "tolerance": tolerance})
    else:
        rows = [
            [
                line.backend,
                f"{line.same_items:.0%}",
                f"{line.overlap:.1%}",
                f"{line.max_score_difference:.2e}",
                format_bytes(line.state_bytes),
            ]
            for line in differences
        ]
        columns = ["backend", "same lists", "overlap", "largest score difference", "beam state"]
        print_table(
            f"{num_requests} requests, beam width {beam_width}, against full_state_copy", columns, rows
        )
        print(f"largest difference {worst:.2e}, tolerance {tolerance:.0e}")
    if not all(line.within(tolerance) for line in differences):
        raise typer.Exit(1)
