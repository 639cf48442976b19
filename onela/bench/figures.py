"""Figures from lines of results, as SVG text. Needs matplotlib, which is an extra: `pip install 'onela[bench]'`."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

from onela.bench.results import Line
from onela.errors import UnavailableError

LABELS = {
    "replay": "OneLA",
    "replay_unfused": "OneLA, unfused",
    "records_moved": "records moved",
    "full_state_copy": "full state per beam",
    "full_state_read_parent": "full state, reading the parent",
    "replay_ssm": "ReplaySSM",
    "replay_ssm_shared": "ReplaySSM, shared checkpoint",
    "transformers": "transformers.generate",
}
COLOURS = {
    "replay": "#0b6e4f",
    "replay_unfused": "#5aa786",
    "records_moved": "#6a8caf",
    "full_state_copy": "#c1440e",
    "full_state_read_parent": "#e08e79",
    "replay_ssm": "#d9a441",
    "replay_ssm_shared": "#8a817c",
    "transformers": "#4a4e69",
}
PART_COLOURS = {
    "matrix_products": "#4a4e69",
    "gdn": "#0b6e4f",
    "reorder": "#c1440e",
    "attention": "#d9a441",
    "head_selection": "#6a8caf",
    "rest": "#c9c5bf",
}


def pyplot() -> Any:
    """matplotlib's pyplot, drawing SVG. Raises `UnavailableError` where there is no matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise UnavailableError("plots: matplotlib is not installed; pip install 'onela[bench]'") from None
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    # Fixed ids and no date: the same lines give the same file.
    plt.rcParams.update(
        {"svg.hashsalt": "onela", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    )
    return plt


def chosen(lines: Sequence[Line], bench: str, metric: str) -> list[Line]:
    """The lines of one benchmark and metric that have a value."""
    return [
        row for row in lines if row["bench"] == bench and row["metric"] == metric and row["value"] is not None
    ]


def arms_of(lines: Sequence[Line]) -> list[str]:
    """The arms of some lines, in their order."""
    return list(dict.fromkeys(row["arm"] for row in lines))


def shape_of(row: Line) -> str:
    """A case in a few words."""
    case = row["case"]
    prompt = f" prompt {case['prompt']}" if "prompt" in case else ""
    return f"R={case['R']} W={case['W']} O={case['O']}{prompt}"


def draw_speedups(axes: Any, lines: Sequence[Line], title: str) -> None:
    """How many times as long every arm takes as replay, by shape."""
    shapes = list(dict.fromkeys(map(shape_of, lines)))
    values = {(row["arm"], shape_of(row)): row["value"] for row in lines}
    arms = [arm for arm in arms_of(lines) if arm != "replay"]
    height = 0.8 / max(1, len(arms))
    for i, arm in enumerate(arms):
        places, ratios = [], []
        for j, shape in enumerate(shapes):
            if (arm, shape) in values and ("replay", shape) in values:
                places.append(j + height * (i - (len(arms) - 1) / 2))
                ratios.append(values[arm, shape] / values["replay", shape])
        bars = axes.barh(
            places, ratios, height=0.9 * height, color=COLOURS.get(arm), label=LABELS.get(arm, arm)
        )
        axes.bar_label(bars, fmt="%.1fx", fontsize=7, padding=2)
    axes.axvline(1.0, color="#222222", linewidth=0.8)
    axes.set_yticks(range(len(shapes)), shapes)
    axes.invert_yaxis()
    axes.set(xlabel="time over OneLA's", title=title)
    axes.legend(frameon=False, fontsize=8)


def draw_parts(axes: Any, lines: Sequence[Line]) -> None:
    """Time of all decode steps by what the kernels are for, one bar per arm."""
    arms = arms_of(lines)
    left = dict.fromkeys(arms, 0.0)
    for part, colour in PART_COLOURS.items():
        values = {row["arm"]: row["value"] for row in lines if row["case"]["part"] == part}
        axes.barh(
            [LABELS.get(arm, arm) for arm in arms],
            [values.get(arm, 0.0) for arm in arms],
            left=[left[arm] for arm in arms],
            color=colour,
            label=part.replace("_", " "),
        )
        left = {arm: left[arm] + values.get(arm, 0.0) for arm in arms}
    axes.invert_yaxis()
    axes.set(xlabel="ms, all decode steps", title="Time per part")
    axes.legend(frameon=False, fontsize=8)


def draw_memory(axes: Any, lines: Sequence[Line]) -> None:
    """Bytes that one request takes, by its beam width."""
    for arm in arms_of(lines):
        points = sorted((row["case"]["W"], row["value"] / 2**20) for row in lines if row["arm"] == arm)
        axes.plot(*zip(*points), marker="o", color=COLOURS.get(arm), label=LABELS.get(arm, arm))
    ticks = sorted({row["case"]["W"] for row in lines})
    log_axes(axes, ticks, "beams", "MiB", "Memory of one request")
    axes.legend(frameon=False, fontsize=8)


def draw_crossover(axes: Any, lines: Sequence[Line]) -> None:
    """Time of one step of a recurrent layer, by the tokens that a beam has written."""
    for arm in arms_of(lines):
        points = sorted((row["case"]["t"] + 1, row["value"]) for row in lines if row["arm"] == arm)
        axes.plot(*zip(*points), marker="o", color=COLOURS.get(arm), label=LABELS.get(arm, arm))
    ticks = sorted({row["case"]["t"] + 1 for row in lines})
    log_axes(axes, ticks, "tokens written", "us", "One step of a recurrent layer")
    axes.legend(frameon=False, fontsize=8)


def log_axes(axes: Any, ticks: Sequence[int], what: str, unit: str, title: str) -> None:
    """Logarithmic axes whose ticks are plain numbers."""
    axes.set(xscale="log", yscale="log", xlabel=what, ylabel=unit, title=title)
    axes.minorticks_off()
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.grid(True, which="major", alpha=0.3)


def figures(lines: Sequence[Line]) -> dict[str, str]:
    """SVG of every figure that the lines suffice for, by name.

    Raises:
        UnavailableError: matplotlib is not installed.
    """
    plt = pyplot()
    operator, decode = chosen(lines, "operator", "time"), chosen(lines, "decode", "decode_forward")
    parts = chosen(lines, "decode", "part_time")
    if parts:
        first = {key: value for key, value in parts[0]["case"].items() if key != "part"}
        parts = [row for row in parts if first.items() <= row["case"].items()]
    memory, crossover = chosen(lines, "capacity", "request_bytes"), chosen(lines, "crossover", "time")
    wanted: dict[str, tuple[Sequence[Line], Callable[[Any], None], int]] = {
        "operator": (operator, lambda axes: draw_speedups(axes, operator, "The operator, by shape"), 0),
        "decode": (decode, lambda axes: draw_speedups(axes, decode, "Decode of a whole model"), 0),
        "parts": (parts, lambda axes: draw_parts(axes, parts), 1),
        "memory": (memory, lambda axes: draw_memory(axes, memory), 1),
        "crossover": (crossover, lambda axes: draw_crossover(axes, crossover), 1),
    }
    drawn = {}
    for name, (rows, draw, fixed) in wanted.items():
        if not rows:
            continue
        bars = len({shape_of(row) for row in rows}) * len(arms_of(rows)) if not fixed else 0
        figure, axes = plt.subplots(figsize=(7.5, max(3.4, 0.9 + 0.2 * bars)), layout="constrained")
        draw(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
        plt.close(figure)
        # What stands before the element is for a file of its own.
        drawn[name] = text.getvalue()[text.getvalue().index("<svg") :]
    return drawn
