"""Draws the figures of the documents from the lines in `bench/results` and from the capacity formulas.

python -m bench.plots
"""

from __future__ import annotations

import os
import sys

if not __package__:  # bench/operator.py would hide the standard library's
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from pathlib import Path
from typing import Any

from bench.report import read_results
from onela.bench.figures import COLOURS, LABELS, log_axes, pyplot
from onela.state.capacity import Workload, own_capacity
from onela.state.geometry import GatedDeltaGeometry

FIGURES = Path(__file__).parent.parent / "docs" / "figures"
CROSSOVER_ARMS = ("full_state_copy", "full_state_read_parent", "replay_ssm", "replay_ssm_shared", "replay")


def draw_memory(axes: Any) -> None:
    """State that the beams of one request hold, by beam width, in the shape of Qwen3.5-0.8B."""
    layers = [GatedDeltaGeometry(16, 16, 128, 128)] * 18
    widths = [64, 128, 256, 512, 1024, 2048, 4096]
    for arm in ("full_state_copy", "replay_ssm", "replay"):
        lines = [
            next(line for line in own_capacity(layers, Workload(1, width, 2)) if line.arm == arm)
            for width in widths
        ]
        gibibytes = [line.persistent / 2**30 for line in lines]
        axes.plot(widths, gibibytes, marker="o", label=LABELS[arm], color=COLOURS[arm])
    log_axes(axes, widths[::2], "beams", "GiB", "State of one request, 18 layers")


def draw_time(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Seconds of a request on two CPU cores, by beam width."""
    rows = [row for row in rows if row["bench"] == "cpu" and row["metric"] == "request_time"]
    for arm in ("transformers", "full_state_copy", "replay_ssm", "replay"):
        points = sorted((row["case"]["beam_width"], row["value"]) for row in rows if row["arm"] == arm)
        if points:
            axes.plot(*zip(*points), marker="o", label=LABELS[arm], color=COLOURS[arm])
    log_axes(axes, [32, 128, 512], "beams", "seconds", "A request on two CPU cores")


def draw_decode(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Milliseconds of the decode forward of Qwen3.5-0.8B's shape on a GPU, by arm and length of the SIDs."""
    rows = [row for row in rows if row["metric"] == "decode_forward" and row["case"]["prompt"] == 1024]
    rows = [row for row in rows if (row["case"]["R"], row["case"]["W"]) == (4, 256)]
    values = {(row["arm"], row["case"]["O"]): row["value"] for row in rows}
    lengths = sorted({length for _, length in values} & {3, 5, 7})
    for i, arm in enumerate(("full_state_copy", "replay_ssm", "replay")):
        places = [x + 0.27 * (i - 1) for x in range(len(lengths))]
        heights = [values.get((arm, length), 0.0) for length in lengths]
        bars = axes.bar(places, heights, width=0.25, color=COLOURS[arm], label=LABELS[arm])
        axes.bar_label(bars, fmt="%.1f", fontsize=8)
    axes.set_xticks(range(len(lengths)), [f"{length} tokens" for length in lengths])
    axes.set(ylabel="ms", title="Decode on one H200, 4 x 256 beams")
    axes.grid(True, axis="y", alpha=0.3)


def draw_step_times(axes: Any, rows: list[dict[str, Any]], what: str, title: str) -> None:
    """Microseconds of a decode step by the ancestors of a beam; full states are as fast at every depth."""
    chosen = [row for row in rows if row["bench"] == "crossover" and row["metric"] == "time"]
    chosen = [
        row
        for row in chosen
        if row["case"]["what"] == what and (row["case"]["R"], row["case"]["W"]) == (4, 256)
    ]
    for arm in CROSSOVER_ARMS:
        for kind, style in (("random", "-"), ("chain", ":")):
            points = sorted(
                (row["case"]["t"], row["value"])
                for row in chosen
                if row["arm"] == arm and row["case"]["tree"] == kind and row["case"]["t"]
            )
            if points:
                name = LABELS[arm] + (", no shared ancestors" if kind == "chain" else "")
                axes.plot(*zip(*points), style, marker=".", label=name, color=COLOURS[arm])
    axes.set(xscale="log", yscale="log", xlabel="ancestors of a beam", ylabel="us", title=title)
    plain_ticks(axes.xaxis, [1, 2, 4, 8, 16, 32, 63, 127, 255])
    plain_ticks(axes.yaxis, [10, 30, 100, 300, 1000, 3000, 5000, 10000, 20000, 50000])
    axes.grid(True, which="major", alpha=0.3)


def plain_ticks(axis: Any, ticks: list[int]) -> None:
    """Plain numbers where the axis reaches, instead of powers of ten."""
    low, high = axis.get_view_interval()
    inside = [tick for tick in ticks if low <= tick <= high]
    axis.set_ticks(inside, labels=[f"{tick:,}" for tick in inside])
    axis.set_minor_locator(axis.get_major_locator())


def draw_state_by_length(axes: Any) -> None:
    """State that a beam holds in one layer, by the tokens of a SID."""
    layers = [GatedDeltaGeometry(16, 16, 128, 128)]
    lengths = [2, 3, 5, 8, 16, 32, 64, 128, 256, 512]
    for arm in CROSSOVER_ARMS:
        lines = [
            next(line for line in own_capacity(layers, Workload(4, 256, length - 1)) if line.arm == arm)
            for length in lengths
        ]
        axes.plot(
            lengths,
            [line.persistent / 2**30 for line in lines],
            marker=".",
            label=LABELS[arm],
            color=COLOURS[arm],
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tokens of a SID",
        ylabel="GiB",
        title="State of a layer, 4 x 256 beams",
    )
    axes.minorticks_off()
    axes.grid(True, which="major", alpha=0.3)


SWEEP_ARMS = ("full_state_copy", "full_state_read_parent", "replay_ssm_shared")


def draw_gains(axes: Any, shapes: list[dict[str, dict[str, Any]]]) -> None:
    """How many times faster than each way to hold a state, shape by shape, in order."""
    for arm in SWEEP_ARMS:
        gains = sorted(row[arm]["value"] / row["replay"]["value"] for row in shapes if arm in row)
        axes.plot(range(1, len(gains) + 1), gains, label=LABELS[arm], color=COLOURS[arm])
    axes.set(yscale="log", xlabel="shapes, in order", ylabel="times faster", title="Replay over other ways")
    axes.set_yticks([5, 10, 20, 50, 100, 200], ["5", "10", "20", "50", "100", "200"])
    axes.minorticks_off()
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(frameon=False)


def draw_floors(axes: Any, shapes: list[dict[str, dict[str, Any]]]) -> None:
    """The time of every shape over that of moving its bytes, by how long that takes."""
    for size, colour in ((128, COLOURS["replay"]), (256, COLOURS["full_state_copy"])):
        rows = [row["replay"] for row in shapes if row["replay"]["case"]["K"] == size]
        points = [(row["floor"] * 1e3, row["ratio_to_floor"]) for row in rows]
        axes.scatter(*zip(*points), s=7, color=colour, label=f"key size {size}")
    axes.set(xscale="log", xlabel="microseconds to move the bytes", ylabel="time over that", ylim=(0, None))
    axes.set_title("All decode calls over their byte floor")
    axes.set_xticks([10, 30, 100, 300, 1000], ["10", "30", "100", "300", "1000"])
    axes.minorticks_off()
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(frameon=False)


def draw_sweep(rows: list[dict[str, Any]]) -> None:
    """The figure of the sweep, when it has been run."""
    shapes: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if (row["bench"], row["metric"]) == ("operator_sweep", "time"):
            shapes.setdefault(str(row["case"]), {})[row["arm"]] = row
    found = [arms for arms in shapes.values() if "replay" in arms]
    if found:
        figure, panels = pyplot().subplots(1, 2, figsize=(10, 3.4), layout="constrained")
        draw_gains(panels[0], found)
        draw_floors(panels[1], found)
        figure.savefig(FIGURES / "sweep.svg", metadata={"Date": None})


def main() -> None:
    plt = pyplot()
    rows = read_results()
    FIGURES.mkdir(parents=True, exist_ok=True)
    figure, panels = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    draw_memory(panels[0])
    draw_time(panels[1], rows)
    draw_decode(panels[2], rows)
    save(figure, panels[1], "overview")
    figure, panels = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    draw_step_times(panels[0], rows, "operator", "Recurrence and reordering, one layer")
    draw_step_times(panels[1], rows, "model", "Decode step, whole model")
    draw_state_by_length(panels[2])
    save(figure, panels[0], "crossover")
    draw_sweep(rows)


def save(figure: Any, legend: Any, name: str) -> None:
    """Write a figure with the labels of one panel below it."""
    handles, labels = legend.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False)
    figure.savefig(FIGURES / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
