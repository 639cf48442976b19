"""`onela bench`."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from onela.bench.figures import figures, pyplot
from onela.bench.models import SHAPE_08B, TINY, random_model
from onela.bench.page import make_page
from onela.bench.results import latest_lines
from onela.bench.suite import FULL, QUICK, SMALL, Recorder, Suite, read_shape, read_values, run_suite
from onela.cli.common import QuantizationOption
from onela.config import check_choice
from onela.decoding.params import MAX_TOKENS
from onela.engine.engine import resolve_device
from onela.errors import CheckpointError, ConfigError, UnavailableError
from onela.models import CausalLM, load_model
from onela.models.footprint import module_bytes


def bench(
    model: Annotated[
        Path | None,
        typer.Argument(
            help="Checkpoint directory; its weights if they are there, else random ones of the shape in its "
            "config.json. Default: the shape of Qwen3.5-0.8B."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The default: a minute on an H200.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="More shapes, prompts and depths, and all arms.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Directory for report.html and results.jsonl.")] = Path(
        "onela-bench"
    ),
    arms: Annotated[
        list[str] | None,
        typer.Option(help="A backend to measure; may be repeated. See the report's columns."),
    ] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="Requests x beams, such as 4x256; may be repeated.")
    ] = None,
    prompt: Annotated[list[int] | None, typer.Option(help="Tokens of a prompt; may be repeated.")] = None,
    tokens: Annotated[int | None, typer.Option(min=2, max=MAX_TOKENS, help="Tokens of a SID.")] = None,
    codebook: Annotated[int | None, typer.Option(min=1, help="Codes of a level.")] = None,
    device: Annotated[str, typer.Option(help="cuda, cuda:N, or cpu: a tiny version.")] = "cuda",
    quantization: QuantizationOption = None,
    lines: Annotated[
        Path | None,
        typer.Option("--from", help="Measure nothing: write the report of an earlier run's results.jsonl."),
    ] = None,
    plots: Annotated[bool, typer.Option(help="Draw figures; they need matplotlib.")] = True,
) -> None:
    """Measure operator, decode and memory with every backend on this machine, and write a report."""
    if quantization is not None:
        check_choice("quantization", quantization, written="--quantization")
    if quick and full:
        raise ConfigError("--quick, --full: give one of them")
    if lines is not None:
        write_again(lines, out, plots)
        return
    place = choose_device(device)
    if plots:
        pyplot()  # what is missing is said before anything is measured
    suite = choose_suite(place, full, arms, shape, prompt, tokens, codebook)
    if model is not None and not model.is_dir():
        raise CheckpointError(f"{model}: no such directory")
    page, results = make_directory(out), out / "results.jsonl"
    results.unlink(missing_ok=True)
    decoder, name = choose_model(model, place)
    weights = module_bytes(decoder, decoder.lm_head.weight.dtype, quantization or "none")
    weights += suite.tokens * suite.codebook * decoder.lm_head.weight[0].nbytes
    if quantization == "fp8":
        decoder.quantize()
        name += ", fp8"
    recorder = Recorder(results, command_line(model, suite, full, place, quantization), typer.echo)
    memory = torch.cuda.mem_get_info(place)[1] if place.type == "cuda" else None
    run_suite(decoder, name, suite, recorder, weight_bytes=weights, memory=memory)
    drawn = figures(recorder.lines) if plots else {}
    title = f"OneLA on {'a CPU' if place.type == 'cpu' else torch.cuda.get_device_name(place)}: {name}"
    page.write_text(make_page(recorder.lines, drawn, title=title, lost=recorder.lost), encoding="utf-8")
    typer.echo(f"{page} and {results}: {len(recorder.lines)} results")
    if recorder.lost:
        typer.echo(f"{len(recorder.lost)} without a result: {'; '.join(recorder.lost)}", err=True)
        raise typer.Exit(1)


def write_again(lines: Path, out: Path, plots: bool) -> None:
    """The report of lines that were measured before, perhaps where there is no matplotlib. Raises `ConfigError`."""
    try:
        rows = latest_lines([lines.read_text(encoding="utf-8")])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--from: {lines} holds no lines of results ({type(error).__name__}: {error})"
        ) from None
    if not rows:
        raise ConfigError(f"--from: {lines} holds no lines of results")
    drawn = figures(rows) if plots else {}
    names = [row["case"]["model"] for row in rows if "model" in row["case"]]
    machine = [("a CPU" if row["gpu"] == "cpu" else row["gpu"]) for row in rows]
    title = f"OneLA on {', '.join(dict.fromkeys(machine))}: {', '.join(dict.fromkeys(names))}"
    page = make_directory(out)
    page.write_text(make_page(rows, drawn, title=title), encoding="utf-8")
    typer.echo(f"{page}: {len(rows)} results")


def choose_device(name: str) -> torch.device:
    """The device to measure. Raises `ConfigError`, `UnavailableError`."""
    try:
        return resolve_device(name)
    except UnavailableError as error:
        raise UnavailableError(f"{error}; --device cpu runs a tiny version") from None


def make_directory(out: Path) -> Path:
    """Make the directory of a report, and open the report's file in it. Raises `ConfigError`."""
    page = out / "report.html"
    try:
        out.mkdir(parents=True, exist_ok=True)
        page.open("a", encoding="utf-8").close()
    except OSError as error:
        raise ConfigError(f"--out: {out} is no directory that can be written to ({error.strerror})") from None
    return page


def choose_suite(
    device: torch.device,
    full: bool,
    arms: list[str] | None,
    shapes: list[str] | None,
    prompts: list[int] | None,
    tokens: int | None,
    codebook: int | None,
) -> Suite:
    """What is measured on this device, changed by what was asked for. Raises `ConfigError`."""
    suite = SMALL if device.type == "cpu" else FULL if full else QUICK
    sizes = tuple(read_shape(text, written="--shape") for text in shapes or ())
    length = tokens or suite.tokens
    changes: dict[str, Any] = {
        "arms": tuple(arms or ()),
        "model_shapes": sizes,
        "operator_shapes": tuple((R, W, length) for R, W in sizes),
        "prompts": tuple(prompts or ()),
        "tokens": tokens,
        "codebook": codebook,
    }
    return dataclasses.replace(suite, **{name: value for name, value in changes.items() if value})


def choose_model(path: Path | None, device: torch.device) -> tuple[CausalLM, str]:
    """The model that is measured, and its name; a path is a directory. Raises `ConfigError`, `CheckpointError`."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if path is None:
        if device.type == "cpu":
            return random_model(TINY, dtype, device), "tiny"
        return random_model(SHAPE_08B, dtype, device), "qwen3.5-0.8b"
    if any(path.glob("*.safetensors")):
        return load_model(path, dtype=str(dtype).split(".")[1], device=device), path.resolve().name
    return random_model(read_values(path), dtype, device), f"{path.resolve().name}, random weights"


def command_line(
    model: Path | None, suite: Suite, full: bool, device: torch.device, quantization: str | None
) -> str:
    """A command that measures the same; the checkpoint by its name alone."""
    words = ["onela", "bench", *([model.resolve().name] if model else []), *(["--full"] if full else [])]
    for arm in suite.arms if suite.arms not in (QUICK.arms, FULL.arms, SMALL.arms) else ():
        words += ["--arms", arm]
    if suite.model_shapes not in (QUICK.model_shapes, FULL.model_shapes, SMALL.model_shapes):
        words += [word for R, W in suite.model_shapes for word in ("--shape", f"{R}x{W}")]
    base = SMALL if device.type == "cpu" else FULL if full else QUICK
    if suite.prompts != base.prompts:
        words += [word for length in suite.prompts for word in ("--prompt", str(length))]
    for option in ("tokens", "codebook"):
        if getattr(suite, option) != getattr(base, option):
            words += [f"--{option}", str(getattr(suite, option))]
    if quantization == "fp8":
        words += ["--quantization", "fp8"]
    return shlex.join([*words, *(["--device", str(device)] if str(device) != "cuda" else [])])
