"""`onela recommend`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from onela.cli.common import (
    CatalogOption,
    ChatTemplateOption,
    DeviceOption,
    DtypeOption,
    ForcedPrefixOption,
    JsonOption,
    ModelPath,
    PatternOption,
    QuantizationOption,
    ThinkingOption,
    VocabularyOption,
    load_engine,
    print_json,
    print_table,
    read_lines,
)
from onela.decoding import BeamParams
from onela.engine import Request, Result
from onela.errors import RequestError

FIELDS = tuple(sorted(field.name for field in dataclasses.fields(Request)))


def recommend(
    model: ModelPath,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", help="A prompt as text; may be repeated.")
    ] = None,
    tokens: Annotated[
        list[str] | None, typer.Option("--tokens", help="A prompt as token ids, '5,17,9'; may be repeated.")
    ] = None,
    requests: Annotated[
        Path | None,
        typer.Option(
            "--requests",
            help="JSONL with prompt_token_ids, prompt or messages per line, and what else a request may have; "
            "'-' for standard input.",
        ),
    ] = None,
    catalog: CatalogOption = None,
    vocabulary: VocabularyOption = None,
    sid_pattern: PatternOption = None,
    beam_width: Annotated[int, typer.Option(help="Beams kept after each step.")] = BeamParams.beam_width,
    num_return_sequences: Annotated[
        int | None,
        typer.Option("--num-return-sequences", "-n", help="Items to return; default: 10."),
    ] = None,
    normalizer: Annotated[str, typer.Option(help="level, allowed or vocabulary.")] = BeamParams.normalizer,
    length_penalty: Annotated[float, typer.Option(help="0 keeps the sum.")] = BeamParams.length_penalty,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    quantization: QuantizationOption = None,
    recurrent_backend: Annotated[
        str | None, typer.Option(help="replay, full_state, replay_ssm, records_moved or auto.")
    ] = None,
    forced_prefix: ForcedPrefixOption = None,
    chat_template: ChatTemplateOption = False,
    enable_thinking: ThinkingOption = False,
    json_output: JsonOption = False,
) -> None:
    """Recommend items for one or many prompts."""
    params = BeamParams.parse(
        {
            "beam_width": beam_width,
            "num_return_sequences": min(10, beam_width)
            if num_return_sequences is None
            else num_return_sequences,
            "normalizer": normalizer,
            "length_penalty": length_penalty,
        }
    )
    asked = [Request(prompt=text) for text in prompt or []]
    asked += [Request(prompt_token_ids=_parse_tokens(text)) for text in tokens or []]
    asked += [_parse_request(*line) for line in (read_lines(requests) if requests is not None else [])]
    if not asked:
        empty = "" if requests is None else f"; {requests} has none"
        raise RequestError("--prompt", f"give --prompt, --tokens or --requests{empty}")
    engine = load_engine(
        model,
        catalog,
        vocabulary,
        sid_pattern=sid_pattern,
        device=device,
        dtype=dtype,
        quantization=quantization,
        recurrent_backend=recurrent_backend,
        forced_prefix=forced_prefix,
        chat_template=chat_template,
        enable_thinking=enable_thinking,
    )
    for number, result in enumerate(engine.generate(asked, params), 1):
        if json_output:
            print_json(result.to_dict())
        else:
            _print_result(number, result)


def _print_result(number: int, result: Result) -> None:
    rows = [
        [
            " ".join(map(str, item.sid)),
            ", ".join(map(str, item.item_ids)) or "-",
            item.title or "-",
            f"{item.cum_logprob:.4f}",
        ]
        for item in result.items
    ]
    name = result.request_id or f"Request {number}"
    usage = result.usage
    title = f"{name}: {len(rows)} items ({result.finish_reason}), {usage.prompt_tokens} prompt tokens"
    print_table(title, ["SID", "item", "title", "cum_logprob"], rows, num_text=3)


def _parse_tokens(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise RequestError("--tokens", "whole numbers with commas between are expected", value=text) from None


def _parse_request(place: str, row: dict[str, Any]) -> Request:
    try:
        for name in row:
            if name not in FIELDS:
                raise RequestError(name, f"unknown field; known are {', '.join(FIELDS)}")
        params = row.get("params")
        return Request(**{**row, "params": None if params is None else BeamParams.parse(params)})
    except RequestError as error:
        raise error.about(f"{place}: {error.field}") from None
