"""`onela evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

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
)
from onela.decoding import BeamParams
from onela.engine.evaluate import Evaluation, EvaluationRun, LevelMetrics, evaluate
from onela.engine.examples import ExampleReader
from onela.errors import ConfigError, UnavailableError

CONSTRAINTS = {"on": (True,), "off": (False,), "both": (True, False)}


def evaluate_command(
    model: ModelPath,
    data: Annotated[
        Path,
        typer.Option("--data", help='JSONL: {"history": ["7", "12"], "target": "4"} per line, or prompts.'),
    ],
    catalog: CatalogOption = None,
    vocabulary: VocabularyOption = None,
    sid_pattern: PatternOption = None,
    beam_width: Annotated[
        list[int] | None,
        typer.Option(min=1, help=f"Beams; may be repeated; default: {BeamParams.beam_width}."),
    ] = None,
    k: Annotated[
        list[int] | None,
        typer.Option("-k", min=1, help="Length of the judged list; may be repeated; default: 5 and 10."),
    ] = None,
    constraint: Annotated[
        str | None, typer.Option(help="on, off or both; default: both, and off without a catalogue.")
    ] = None,
    template: Annotated[str, typer.Option(help="Text around a history.")] = ExampleReader.template,
    max_history: Annotated[int | None, typer.Option(min=1, help="Latest items of a history to keep.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Take only the first lines of the data.")] = None,
    normalizer: Annotated[str, typer.Option(help="level, allowed or vocabulary.")] = BeamParams.normalizer,
    forced_prefix: ForcedPrefixOption = None,
    chat_template: ChatTemplateOption = False,
    enable_thinking: ThinkingOption = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    quantization: QuantizationOption = None,
    plot: Annotated[Path | None, typer.Option(help="Write recall by beam width as an image.")] = None,
    json_output: JsonOption = False,
) -> None:
    """Measure recall, NDCG, hit rate, legality and coverage on held-out interactions."""
    if constraint is not None and constraint not in CONSTRAINTS:
        raise ConfigError(f"--constraint: {constraint!r} is none of {', '.join(CONSTRAINTS)}")
    if plot is not None:
        _pyplot()
    engine = load_engine(
        model,
        catalog,
        vocabulary,
        sid_pattern=sid_pattern,
        device=device,
        dtype=dtype,
        quantization=quantization,
        forced_prefix=forced_prefix,
        chat_template=chat_template,
        enable_thinking=enable_thinking,
    )
    reader = ExampleReader(
        engine.vocabulary, engine.catalog, template, max_history, as_tokens=engine.tokenizer is None
    )
    examples = reader.read(data)[:limit]
    widths = beam_width or [BeamParams.beam_width]
    constraints = CONSTRAINTS[constraint or ("off" if engine.catalog is None else "both")]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # On standard error, so that the output stays what was asked for.
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("evaluating", total=len(examples) * len(set(widths)) * len(constraints))
        report = evaluate(
            engine,
            examples,
            beam_widths=widths,
            ks=k or [5, 10],
            constraints=constraints,
            normalizer=normalizer,
            progress=lambda count: bar.advance(task, count),
        )
    if json_output:
        print_json(report.to_json())
    else:
        _print_report(report)
    if plot is not None:
        _plot(report, plot)


def _print_report(report: Evaluation) -> None:
    for level, title in (("sid", "semantic IDs"), ("item", "items")):
        rows = [
            [*_name(run), str(k), *_cells(metrics, k)]
            for run in report.runs
            if (metrics := _level_of(run, level)) is not None
            for k in report.ks
        ]
        if rows:
            columns = ["constraint", "beams", "k", "recall", "NDCG", "hit rate", "coverage"]
            print_table(f"{title}, {report.num_examples} examples", columns, rows)
    rows = [
        [
            *_name(run),
            "-" if run.legal_share is None else f"{run.legal_share:.4f}",
            f"{run.distinct_share:.4f}",
            f"{run.num_returned:.1f}",
            f"{run.seconds:.2f}",
        ]
        for run in report.runs
    ]
    print_table("answers", ["constraint", "beams", "legal", "distinct", "SIDs each", "seconds"], rows)


def _name(run: EvaluationRun) -> list[str]:
    return ["on" if run.constrained else "off", str(run.beam_width)]


def _cells(metrics: LevelMetrics, k: int) -> list[str]:
    values = [metrics.recall[k], metrics.ndcg[k], metrics.hit_rate[k]]
    coverage = "-" if metrics.coverage is None else f"{metrics.coverage[k]:.4f}"
    return [*(f"{value:.4f}" for value in values), coverage]


def _plot(report: Evaluation, path: Path) -> None:
    """Recall at the longest k over the beam width, one line per constraint and level."""
    pyplot = _pyplot()
    k = report.ks[-1]
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for constrained in sorted({run.constrained for run in report.runs}, reverse=True):
        runs = [run for run in report.runs if run.constrained == constrained]
        for level in ("sid", "item"):
            points = [
                (run.beam_width, metrics.recall[k]) for run in runs if (metrics := _level_of(run, level))
            ]
            if points:
                label = f"{'SID' if level == 'sid' else 'item'}, constraint {'on' if constrained else 'off'}"
                axes.plot(*zip(*points), marker="o", linestyle="-" if constrained else "--", label=label)
    axes.set(xscale="log", xlabel="beam width", ylabel=f"Recall@{k}")
    axes.set_ylim(bottom=0)
    axes.set_xticks(sorted({run.beam_width for run in report.runs}))
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.minorticks_off()
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot: {path} cannot be written ({error})") from error
    finally:
        pyplot.close(figure)


def _level_of(run: EvaluationRun, level: str) -> LevelMetrics | None:
    return run.sid if level == "sid" else run.item


def _pyplot():  # type: ignore[no-untyped-def] # matplotlib is optional, and so are its types
    try:
        import matplotlib
    except ImportError:
        raise UnavailableError("--plot: matplotlib is not installed; it comes with onela[demo]") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
