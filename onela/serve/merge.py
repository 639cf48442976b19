"""One text of metrics from several replicas'."""

from __future__ import annotations

from collections.abc import Sequence


def merge_metrics(texts: Sequence[str]) -> str:
    """Join Prometheus texts: every sample gets a `replica` label, samples of one metric stay together.

    Args:
        texts: one per replica, as `Metrics.render` gives them.
    """
    # Metric -> its HELP and TYPE lines, then its samples.
    families: dict[str, tuple[list[str], list[str]]] = {}
    for number, text in enumerate(texts):
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                heads, _ = families.setdefault(family, ([], []))
                if line not in heads:
                    heads.append(line)
            elif line:
                families.setdefault(family, ([], []))[1].append(_label(line, number))
    lines = [line for heads, samples in families.values() for line in (*heads, *samples)]
    return "".join(f"{line}\n" for line in lines)


def _label(sample: str, replica: int) -> str:
    name, _, rest = sample.partition(" ")
    if "{" not in sample:
        return f'{name}{{replica="{replica}"}} {rest}'
    name, _, rest = sample.partition("{")
    return f'{name}{{replica="{replica}",{rest}'
